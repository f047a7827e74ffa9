"""Checks that pip can install the requirement files on every supported system and Python, without installing anything.

    python dev/check_requirements.py

Each file is resolved for Linux, macOS and Windows and Python 3.11 to 3.14, from wheels of the package index alone, as
on a machine where nothing is configured. `uv` does it in seconds; without one in PATH, it is installed into a temporary
directory. The index is the one that pip is configured with, or pip's default; further indexes and folders of wheels in
pip's configuration are ignored.

Result: a table with the number of packages in each case, and exit code 1 if a case fails. If no index answers,
nothing is checked: one line says so, and the exit code is 0. Takes 20 seconds to 2 minutes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "requirements-quickstart.txt",
    "requirements.txt",
    "requirements-hf.txt",
    "requirements-test.txt",
)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# Names of uv. torch 2.11.0 has no wheels for macOS 13, nor for Macs with Intel processors.
PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_28",
    "macOS 14 ARM": "aarch64-apple-darwin",
    "Windows x86-64": "x86_64-pc-windows-msvc",
}
MACOS = "14.0"
UV = "uv==0.13.9"


def pip_index() -> str:
    """Address of the package index that pip uses, from its configuration, or else its default."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line)
    for name in (":env:.index-url", "install.index-url", "global.index-url"):
        if name in settings:
            return settings[name].strip("'\"")
    return "https://pypi.org/simple"


def unreachable(index: str) -> str:
    """Why the index does not answer, or an empty text if it does."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/tqdm/", timeout=10) as answer:
            answer.read(1)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def find_uv(folder: str) -> str | None:
    """The path of uv: from PATH, or else installed into the folder. None if pip cannot install it."""
    found = shutil.which("uv")
    if found:
        return found

    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-input",
        "--target",
        folder,
        UV,
    ]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0:
        return None
    return shutil.which("uv", path=str(Path(folder) / "bin"))


def resolve(uv: str, index: str, file: str, python: str, platform: str) -> tuple[int, str]:
    """The number of packages that a requirement file stands for (0 if it does not resolve), and uv's errors."""
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--no-config",
        "--no-build",
        "--no-header",
        "--no-annotate",
    ]
    command += [
        "--python",
        sys.executable,
        "--python-version",
        python,
        "--python-platform",
        platform,
    ]
    command += ["--default-index", index, file]
    # Of uv's own settings only the folder of its cache is kept.
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("UV_") or k == "UV_CACHE_DIR"
    }
    environment["MACOSX_DEPLOYMENT_TARGET"] = MACOS
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        return 0, done.stderr.strip()
    return sum("==" in line for line in done.stdout.splitlines()), ""


def main() -> int:
    index = pip_index()
    reason = unreachable(index)
    if reason:
        print(f"check_requirements: skipped, the package index does not answer ({reason})")
        return 0

    errors = []
    with tempfile.TemporaryDirectory() as folder:
        uv = find_uv(folder)
        if uv is None:
            print(f"check_requirements: skipped, pip could not install {UV} from the package index")
            return 0

        print(f"{'packages to install':28} {'':15}" + "".join(f"{python:>8}" for python in PYTHONS))
        for file in FILES:
            for name, platform in PLATFORMS.items():
                row = f"{file:28} {name:15}"
                for python in PYTHONS:
                    packages, error = resolve(uv, index, file, python, platform)
                    row += f"{packages or 'FAILS':>8}"
                    if error:
                        errors.append(f"{file}, {name}, Python {python}:\n{error}")
                print(row, flush=True)

    if errors:
        print("\n\n".join(["", *errors]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
