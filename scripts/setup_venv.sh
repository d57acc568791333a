#!/usr/bin/env bash
# Makes .venv beside pyproject.toml and installs the package with the given extras: setup_venv.sh [EXTRAS]
set -euo pipefail
cd "$(dirname "$0")/.."
extras="${1:-dev}"
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: Python 3.10 or newer is needed; name one with PYTHON=/path/to/python3" >&2; exit 2; }
# Also where an earlier attempt ended before pip was there, as on a system without python3-venv.
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    # One version that is known to work; name another build with TORCH='torch==...'.
    echo "installing torch ..." >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "${TORCH:-torch==2.13.0}"
fi
echo "installing simcse-weince[$extras] ..." >&2
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
