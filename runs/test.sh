#!/usr/bin/env bash
# Sets up .venv with the test requirements, checks style (ruff) and runs the tests that need no GPU.
# Arguments are passed to pytest:  bash runs/test.sh tests/test_model.py -k attention
# Time: 5 to 7 minutes on two cores, plus the first installation. It uses up to 4 cores, one test file each.
# Result: the last line of pytest, and its exit code.
set -euo pipefail
# shellcheck source=runs/lib/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/help.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source runs/lib/setup.sh
setup requirements-test.txt
ruff check .
exec python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
