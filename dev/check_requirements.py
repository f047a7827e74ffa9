"""Checks that pip can install the requirement files on every supported system and Python, without installing anything.

    python dev/check_requirements.py

Each file is resolved for Linux, macOS and Windows and Python 3.11 to 3.14, from wheels of the package index alone. The
two files include requirements.txt and requirements-quickstart.txt, whose packages are pinned, so these resolve too.
`uv` does it; without one in PATH, it is installed into a temporary directory. The index is the one that pip is
configured with, or pip's default.

Prints a table with the number of packages in each case; the exit code is 1 if a case fails. If no index answers,
nothing is checked: one line says so, and the exit code is 0. Takes 10 seconds to 1 minute.
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
    "runs/huggingface/requirements-hf.txt",
    "requirements-test.txt",
)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# Names of uv. llguidance 1.9.1 requires glibc 2.31 (Ubuntu 20.04). torch 2.11.0 has no wheels for macOS 13, nor for
# Macs with Intel processors.
PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_31",
    "macOS 14 ARM": "aarch64-apple-darwin",
    "Windows x86-64": "x86_64-pc-windows-msvc",
}
MACOS = "14.0"
UV = "uv==0.13.9"
COMPILE = "pip compile --quiet --no-config --no-build --no-header --no-annotate".split()


def pip_index() -> str:
    """Address of the package index that pip uses, from its configuration, or else its default."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line)
    for name in (":env:.index-url", "install.index-url", "global.index-url"):
        if name in settings:
            return settings[name].strip("'\"")
    return "https://pypi.org/simple"


def find_uv(folder: str) -> str | None:
    """The path of uv: from PATH, or else installed into the folder. None if pip cannot install it."""
    found = shutil.which("uv")
    if found:
        return found
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--target", folder, UV]
    subprocess.run(pip, stderr=subprocess.DEVNULL)
    return shutil.which("uv", path=str(Path(folder) / "bin"))


def resolve(uv: str, index: str, file: str, python: str, platform: str) -> tuple[int, str]:
    """The number of packages that a requirement file stands for, or 0 and what uv says."""
    case = ["--python-version", python, "--python-platform", platform, "--default-index", index]
    command = [uv, *COMPILE, "--python", sys.executable, *case, file]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": MACOS}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        return 0, done.stderr.strip()
    return sum("==" in line for line in done.stdout.splitlines()), ""


def check(uv: str, index: str) -> list[str]:
    """Prints the table; returns what uv says of the cases that fail."""
    errors = []
    print(f"{'packages to install':40} {'':15}" + "".join(f"{python:>8}" for python in PYTHONS))
    for file in FILES:
        for name, platform in PLATFORMS.items():
            row = f"{file:40} {name:15}"
            for python in PYTHONS:
                packages, error = resolve(uv, index, file, python, platform)
                row += f"{packages or 'FAILS':>8}"
                if error:
                    errors.append(f"{file}, {name}, Python {python}:\n{error}")
            print(row, flush=True)
    return errors


def main() -> int:
    index = pip_index()
    try:
        urllib.request.urlopen(f"{index.rstrip('/')}/tqdm/", timeout=10).close()
    except (OSError, ValueError) as error:
        print(f"check_requirements: skipped, the package index does not answer ({error})")
        return 0

    with tempfile.TemporaryDirectory() as folder:
        uv = find_uv(folder)
        if uv is None:
            print(f"check_requirements: skipped, pip could not install {UV} from the package index")
            return 0
        errors = check(uv, index)
    if errors:
        print("\n\n".join(["", *errors]))
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
