#!/usr/bin/env bash
# Create or update .venv for the current pyproject.toml; sourced by the other scripts, which then call $PY.
# Usage: source scripts/venv.sh EXTRAS      EXTRAS: "" (to run) or "[dev]" (to test)
set -euo pipefail
PYTHON=${PYTHON:-python3}   # interpreter to create .venv with, 3.11 or newer
EXTRAS=$1

run() { echo "+ $*"; "$@"; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PY=.venv/bin/python
if [ ! -x "$PY" ]; then
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "wanjax needs Python 3.11 or newer, '$PYTHON' is $("$PYTHON" --version 2>&1); set PYTHON=..." >&2
    exit 1
  }
  run "$PYTHON" -m venv .venv
fi
# The stamp records what was installed; the dev extras include everything needed to run.
stamp=$("$PY" -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest()[:16])')
if [ ! -e ".venv/.installed-$stamp-[dev]" ] && [ ! -e ".venv/.installed-$stamp-$EXTRAS" ]; then
  run "$PY" -m pip install --disable-pip-version-check --progress-bar off -q -e ".$EXTRAS"
  rm -f .venv/.installed-*
  touch ".venv/.installed-$stamp-$EXTRAS"
fi
