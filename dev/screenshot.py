"""A picture of the web page of runs/serve.py with a conversation, taken in headless Chromium.

    python dev/screenshot.py http://127.0.0.1:8000 page.png "Why is the sky blue?" "And at sunset?"
    python dev/screenshot.py http://127.0.0.1:8000 phone.png "Hello" --size 390x760 --dark

Needs the package playwright and a Chromium: that of the system (apt-get install chromium) or playwright's own
(playwright install chromium).
"""

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path


def find_chromium() -> str | None:
    """Path of a Chromium, the system's or playwright's; None if there is none, or no playwright."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    with sync_playwright() as play:
        path = play.chromium.executable_path
    return path if Path(path).exists() else None


@contextlib.contextmanager
def open_page(
    url: str, chromium: str, size: tuple[int, int] = (900, 760), dark: bool = False
) -> Iterator:
    """A playwright page at a URL. Raises what the page's script raises or logs as an error, once it is left."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium)
        page = browser.new_page(viewport=dict(zip(("width", "height"), size, strict=True)),
                                color_scheme="dark" if dark else "light", device_scale_factor=1.5)  # fmt: skip
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda message: (
                message.type == "error" and problems.append(message.text)
                if "Failed to load resource" not in message.text
                else None
            ),
        )  # an answer of 400 is one, and is no fault
        page.goto(url)
        page.wait_for_selector("#send:enabled")
        try:
            yield page
        finally:
            browser.close()
        if problems:
            raise RuntimeError(f"the page reports {problems[0]}")


def ask(page, question: str, seconds: float = 120) -> None:
    """Types a message and waits until the answer is there."""
    page.fill("#message", question)
    page.press("#message", "Enter")  # the page hides #send at once
    page.wait_for_selector("#send", timeout=seconds * 1000)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="A picture of a conversation in the web page of runs/serve.py."
    )
    parser.add_argument("url", metavar="URL")
    parser.add_argument("out", metavar="OUT.png", type=Path)
    parser.add_argument("questions", metavar="QUESTION", nargs="*")
    parser.add_argument("--size", default="900x760", help="of the window, in CSS pixels")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--temperature", default="0")
    args = parser.parse_args()
    chromium = find_chromium()
    if not chromium:
        print("error: there is no playwright or no Chromium; pip install playwright, and apt-get install chromium or "
              "playwright install chromium", file=sys.stderr)  # fmt: skip
        return 1
    width, height = map(int, args.size.split("x"))
    with open_page(args.url, chromium, (width, height), args.dark) as page:
        page.evaluate(
            "value => { document.getElementById('temperature').value = value }", args.temperature
        )
        for question in args.questions:
            ask(page, question)
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=args.out)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
