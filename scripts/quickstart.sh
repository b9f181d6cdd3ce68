#!/usr/bin/env bash
# Set up .venv (first time only), then post-train the embedded two-expert model on this machine.
# Usage: bash scripts/quickstart.sh [--config.key=value ...]
#   PYTHON=python3.12 bash scripts/quickstart.sh      choose the interpreter (3.11 or newer)
# The same command continues an interrupted run; a different --config.name starts a new one.
set -euo pipefail
CONFIG=${CONFIG:-configs/quickstart.py}

source "$(dirname "$0")/venv.sh" ""
run "$PY" -m wanjax.train --config "$CONFIG" "$@"
