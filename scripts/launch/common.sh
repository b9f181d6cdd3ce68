#!/usr/bin/env bash
# Shared by the launchers, which source it with their arguments: [--dry_run] ACTION [wanjax.train flags].
# Launchers act only through `run` and `start`, which print the command, ready to paste, under --dry_run.
# shellcheck disable=SC2034  # ACTION, FLAGS and the definitions below are for the launchers
set -euo pipefail
fail() { echo "$(basename "$0"): $*" >&2; exit 1; }
[ "${BASH_VERSINFO[0]}${BASH_VERSINFO[1]}" -ge 44 ] || fail "bash $BASH_VERSION is too old, expected 4.4 or newer"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
DRY_RUN=0 PIDS=() LOG=
if [ "${1:-}" = --dry_run ]; then DRY_RUN=1; shift; fi
ACTION=${1:-} FLAGS=("${@:2}")

quote() { # the words as shell input, quoted only where needed
  local word line=
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
    line+="$word "
  done
  echo "${line% }"
}

run() {
  if [ "$DRY_RUN" = 1 ]; then quote "$@"; return; fi
  echo "+ $(quote "$@")" >&2
  "$@"
}

# Run a command in the background; `finish` waits for all of them and returns their verdict.
start() {
  if [ "$DRY_RUN" = 1 ]; then quote "$@"; return; fi
  LOG=${LOG:-$(mktemp)}
  echo "+ $(quote "$@")" >&2
  { "$@" || echo "wanjax exit code 255"; } 2>&1 | tee -a "$LOG" & PIDS+=($!)
}

finish() {
  local codes
  [ "$DRY_RUN" = 0 ] || return 0
  wait "${PIDS[@]}" || true
  mapfile -t codes < <(sed -n 's/.*wanjax exit code \([0-9]*\)$/\1/p' "$LOG")
  rm -f "$LOG"
  verdict "${codes[@]}"
}

# Combine the processes' exit codes into one: 0 if all are done; 1 if any hit a bug or a bad config; else
# 42, start again: one was preempted (42), was killed or lost contact with the others (127 and above).
verdict() {
  local code result=0
  [ $# -gt 0 ] || return 42
  for code; do
    if [ "$code" = 42 ] || [ "$code" -ge 127 ]; then [ "$result" = 1 ] || result=42
    elif [ "$code" != 0 ]; then result=1; fi
  done
  return "$result"
}

# A line for a host with a checkout in ~/wanjax: train, log there, and print the exit code for `finish`.
remote_train() {
  echo "cd wanjax && mkdir -p logs && { $(quote .venv/bin/python -u -m wanjax.train "$@") 2>&1;" \
    "echo wanjax exit code \$?; } | tee -a logs/train.log"
}

# The committed files as an archive, and a line that unpacks it to ~/wanjax on a host and makes its .venv.
ARCHIVE=${TMPDIR:-/tmp}/wanjax.tar.gz
REMOTE_SETUP="mkdir -p wanjax && tar xzf wanjax.tar.gz -C wanjax && cd wanjax && export PIP_BREAK_SYSTEM_PACKAGES=1 && \
{ python3 -m pip --version || sudo apt-get install -yq python3-pip; } && python3 -m pip install -q --user uv && \
python3 -m uv venv -q --allow-existing --python 3.12 .venv && python3 -m uv pip install -q -e .[tpu]"
