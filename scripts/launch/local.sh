#!/usr/bin/env bash
# Several processes on this machine over the loopback interface; exits once all of them have.
# Usage: PROCESSES=2 bash scripts/launch/local.sh [--dry_run] run [wanjax.train flags]
#   PLATFORM=gpu PROCESSES=4 bash scripts/launch/local.sh run …     one GPU each
# Process 0 logs to the console, every process to $LOGS/process-*.log. Exits 0, 1 or 42.
set -euo pipefail
PROCESSES=${PROCESSES:-2}
PLATFORM=${PLATFORM:-cpu}       # cpu or gpu
DEVICES=${DEVICES:-1}           # per process
PORT=${PORT:-29400}             # of process 0, on 127.0.0.1 only
PYTHON=${PYTHON:-.venv/bin/python}
LOGS=${LOGS:-runs/local}
GRACE=${GRACE:-60}              # seconds until the others are killed after one fails

source "$(dirname "$0")/common.sh" "$@"
[ "$ACTION" = run ] || fail "action is '$ACTION', expected run"
[ "$PROCESSES" -ge 1 ] || fail "PROCESSES is '$PROCESSES', expected at least 1"
process() { # set the array `command` to what process $1 runs
  local first=$(($1 * DEVICES)) place
  place=("--coordinator=127.0.0.1:$PORT" "--num_processes=$PROCESSES" "--process_id=$1")
  case $PLATFORM in
    cpu) command=(env JAX_PLATFORMS=cpu "JAX_NUM_CPU_DEVICES=$DEVICES") ;;
    gpu) command=(env) place+=("--local_devices=$(seq -s , "$first" $((first + DEVICES - 1)))") ;;
    *) fail "PLATFORM is '$PLATFORM', expected cpu or gpu" ;;
  esac
  command+=("$PYTHON" -u -m wanjax.train "${place[@]}" "${FLAGS[@]}")
}
run mkdir -p "$LOGS"
pids=() codes=() deadline=
trap '[ ${#pids[@]} = 0 ] || kill "${pids[@]}" 2>/dev/null || true' EXIT TERM INT # asks them to save and stop
for ((i = 0; i < PROCESSES; i++)); do
  process "$i"
  if [ "$DRY_RUN" = 1 ]; then quote "${command[@]}"; continue; fi
  echo "+ $(quote "${command[@]}")" >&2
  if [ "$i" = 0 ]; then "${command[@]}" > >(tee "$LOGS/process-$i.log") 2>&1 &
  else "${command[@]}" >"$LOGS/process-$i.log" 2>&1 & fi
  pids+=($!)
done
[ "$DRY_RUN" = 0 ] || exit 0
while [ ${#pids[@]} -gt 0 ]; do
  sleep 0.2
  alive=()
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then alive+=("$pid"); continue; fi
    code=0
    wait "$pid" || code=$?
    codes+=("$code")
    [ "$code" = 0 ] || deadline=${deadline:-$((SECONDS + GRACE))}
  done
  pids=("${alive[@]}")
  if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ] && [ ${#pids[@]} -gt 0 ]; then kill -KILL "${pids[@]}"; fi
done
code=0
verdict "${codes[@]}" || code=$?
[ "$code" = 0 ] || echo "local.sh: processes ended with ${codes[*]}, exit code $code; see $LOGS/process-*.log" >&2
exit "$code"
