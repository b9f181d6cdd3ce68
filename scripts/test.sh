#!/usr/bin/env bash
# Set up .venv with everything the tests need (first time only), then lint, type-check and test on the CPU.
# Usage: bash scripts/test.sh [pytest arguments]
#   WORKERS=4 bash scripts/test.sh          pytest processes, about 2 GB each
#   bash scripts/test.sh tests/models       a subset of the tests
set -euo pipefail
WORKERS=${WORKERS:-2}

source "$(dirname "$0")/venv.sh" "[dev]"
run "$PY" -m ruff check .
run "$PY" -m ruff format --check .
run "$PY" -m pyright
# worksteal keeps a file in one process, which has already compiled its programs
run "$PY" -m pytest -n "$WORKERS" --dist worksteal "$@"
