#!/usr/bin/env bash
# Set up .venv with all that the tests need (first time only), then lint, check types and test on the CPU.
# Usage: bash scripts/test.sh [pytest arguments]
#   WORKERS=4 bash scripts/test.sh          pytest processes, about 2 GB each
#   bash scripts/test.sh tests/models       a part of the tests
set -euo pipefail
WORKERS=${WORKERS:-2}

source "$(dirname "$0")/venv.sh" "[dev]"
run "$PY" -m ruff check .
run "$PY" -m ruff format --check .
run "$PY" -m pyright
# worksteal: a file stays in one process, which has compiled its programs already
run "$PY" -m pytest -n "$WORKERS" --dist worksteal "$@"
