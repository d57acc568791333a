#!/usr/bin/env bash
# Sets up .venv and runs the tests, one process per core; further arguments go to pytest, for example: bash scripts/test.sh -k ln01
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_venv.sh dev
exec .venv/bin/python -m pytest --numprocesses auto "$@"
