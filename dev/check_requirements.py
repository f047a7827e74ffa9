"""Checks that pip can install the requirement files on every supported system and Python, without installing anything.

    python dev/check_requirements.py

`uv`, which is installed into a temporary directory, resolves each file from wheels alone. The two files include
requirements.txt and requirements-quickstart.txt, whose packages are pinned. Prints the number of packages in each case;
the exit code is 1 if a case fails. Without a package index nothing is checked: one line says so, and the exit code is
0. Takes 10 seconds to 1 minute.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("runs/huggingface/requirements-hf.txt", "requirements-test.txt")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# Names of uv. llguidance 1.9.1 requires glibc 2.31 (Ubuntu 20.04). torch 2.11.0 has no wheels for macOS 13, nor for
# Macs with Intel processors.
PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_31",
    "macOS 14 ARM": "aarch64-apple-darwin",
    "Windows x86-64": "x86_64-pc-windows-msvc",
}
MACOS = "14.0"
PIP = (sys.executable, "-m", "pip")
INSTALL = "install --quiet --no-input uv==0.13.9 --target".split()
COMPILE = "pip compile --quiet --no-config --no-build --no-header --no-annotate".split()


def pip_index() -> str:
    """Address of the package index that pip uses: its configuration lists the environment first."""
    settings = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
    found = re.search(r"^(?::env:|global|install)\.index-url='(.*)'", settings, re.M)
    return found[1] if found else "https://pypi.org/simple"


def resolve(uv: Path, index: str, file: str, python: str, platform: str) -> tuple[int, str]:
    """The number of packages that a requirement file stands for, or 0 and what uv says."""
    case = ["--python-version", python, "--python-platform", platform, "--default-index", index]
    command = [uv, *COMPILE, "--python", sys.executable, *case, file]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": MACOS}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        return 0, f"{file}, {platform}, Python {python}:\n{done.stderr.strip()}"
    return sum("==" in line for line in done.stdout.splitlines()), ""


def main() -> str | int:
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run([*PIP, *INSTALL, folder], stderr=subprocess.DEVNULL).returncode:
            print("check_requirements: skipped, pip could not install uv from the package index")
            return 0
        uv = Path(folder) / "bin" / "uv"
        index = pip_index()
        print(f"{'packages to install':40} {'':15}" + "".join(f"{python:>8}" for python in PYTHONS))
        for file in FILES:
            for name, platform in PLATFORMS.items():
                found = [resolve(uv, index, file, python, platform) for python in PYTHONS]
                print(f"{file:40} {name:15}" + "".join(f"{count or 'FAILS':>8}" for count, _ in found), flush=True)
                errors += [error for _, error in found if error]
    return "\n\n".join(errors) or 0


if __name__ == "__main__":
    sys.exit(main())
