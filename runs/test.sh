#!/usr/bin/env bash
# Sets up .venv with the test requirements, checks the style with ruff and runs the tests that need no GPU.
# Arguments go to pytest:  bash runs/test.sh tests/test_model.py -k cache
# Time: 5 to 10 minutes on two cores, the first installation not counted; file by file on up to 4 cores.
# Result: pytest's closing line; its exit code.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source runs/setup.sh
setup requirements-test.txt
ruff check .
exec python -m pytest -q -n auto --maxprocesses 4 --dist loadfile "$@"
