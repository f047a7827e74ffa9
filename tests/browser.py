"""The web page of runs/serve.py in a headless Chromium, for the tests marked `browser`.

Needs the package playwright and a Chromium: the system's (apt-get install chromium) or playwright's own
(playwright install chromium).
"""

import contextlib
import shutil
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
def launch(path: str) -> Iterator:
    """A headless Chromium of playwright. While it runs, this thread has an event loop, so asyncio.run fails there."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path)
        try:
            yield chromium
        finally:
            chromium.close()


@contextlib.contextmanager
def open_page(
    url: str,
    chromium,
    size: tuple[int, int] = (900, 760),
    ready: str = "#send:enabled",
    scheme: str = "light",
    bypass_csp: bool = False,
) -> Iterator:
    """A page of its own context at a URL, once `ready` is seen. Raises an error of the page's script, once it is left.

    chromium: what launch gives; bypass_csp: for scripts of a test, which the page's policy forbids
    """
    problems: list[str] = []

    def note(message) -> None:
        """Keeps errors of the console, except that of an answer of 400, which is no fault of the page."""
        if message.type == "error" and "Failed to load resource" not in message.text:
            problems.append(message.text)

    viewport = {"width": size[0], "height": size[1]}
    context = chromium.new_context(viewport=viewport, color_scheme=scheme, bypass_csp=bypass_csp)
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", note)
    try:
        page.goto(url)
        page.wait_for_selector(ready)
        yield page
    finally:
        context.close()
    if problems:
        raise RuntimeError(f"the page reports {problems[0]}")


def ask(page, question: str, seconds: float = 120) -> None:
    """Types a message and waits until the answer is there."""
    page.fill("#message", question)
    page.press("#message", "Enter")  # the page hides #send at once
    page.wait_for_selector("#send", timeout=seconds * 1000)
