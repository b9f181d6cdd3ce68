#!/usr/bin/env bash
# The Wan2.2-A14B recipes at full size with random weights: train, kill -9, resume, export, sample with the LoRA.
# Usage: bash scripts/fullsize.sh FOLDER [--config.key=value ...]     64 GB; the same command continues where it was
#   ALGORITHMS="grpo nft sft dmd2" bash scripts/fullsize.sh FOLDER    more than GRPO, the others for one step
#   MODEL_ARGS=--small SIZE=32x32 bash scripts/fullsize.sh FOLDER     a tiny model, for a CPU
# Prints a table of stages and steps, which FOLDER/fullsize.md keeps, with the output of each stage beside it.
set -euo pipefail
ALGORITHMS=${ALGORITHMS:-grpo}
STEPS=${STEPS:-3}            # of GRPO, which is killed after the first
SIZE=${SIZE:-480x480}        # height x width of all videos, of 5 frames
MODEL_ARGS=${MODEL_ARGS:-}   # of scripts/make_random_model.py, such as --layers 4
PY=${PYTHON:-python3}

fail() { echo "fullsize: $*" >&2; exit 1; }
[[ $# -gt 0 && $1 != --* ]] || fail "expected a folder to work in as first argument, got '${1:-}'"
mkdir -p "$1" && OUT=$(cd "$1" && pwd) && shift
cd "$(dirname "${BASH_SOURCE[0]}")/.." && export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
trap 'jobs -p | xargs -r kill -9' EXIT

steps() { find "$RUN/checkpoints" -maxdepth 1 -name 'step_*' 2>/dev/null | sed 's/.*_0*//' | sort -n | tail -n 1; }
stage() { # NAME COMMAND...: run it once, with its output in a log; note its seconds and the steps saved after it
  local name=$1 log=$OUT/$A-$1.log start=$SECONDS
  grep -qs "^$A $name " "$OUT/stages.txt" && return
  echo "+ ${*:2}"
  "${@:2}" >"$log" 2>&1 || fail "$A $name ended with exit code $?: $(tail -n 1 "$log"); its output is in $log"
  echo "$A $name $((SECONDS - start)) $(steps)" >>"$OUT/stages.txt"
}
killed() { # COMMAND...: SIGKILL it when its first checkpoint is complete
  "$@" & local pid=$!
  until [ "$(steps)" ]; do kill -0 "$pid" 2>/dev/null && sleep 0.05 || return 1; done
  kill -9 "$pid" && ! wait "$pid" && [ "$(steps)" -lt "$STEPS" ]
}

A=make RUN=$OUT/runs/make H=${SIZE%x*} W=${SIZE#*x}
printf 'a %s moving left\n' {red,green,blue,white}" "{circle,square,cat,dog} >"$OUT/prompts.txt"
rm -rf "$OUT"/.{model,tower}.* # what an interrupted start left
for kind in model tower; do # shellcheck disable=SC2086
  stage "$kind" "$PY" scripts/make_random_model.py "--$kind" "$OUT/$kind" $MODEL_ARGS
done
for A in $ALGORITHMS; do
  RUN=$OUT/runs/$A LORA=()
  TRAIN=("$PY" -m wanjax.train --config "scripts/bench/fullsize_config.py:$A,$OUT" "--config.sampling.height=$H"
    "--config.sampling.width=$W" "--config.steps=$([ "$A" = grpo ] && echo "$STEPS" || echo 1)" "$@")
  if [ "$A" = sft ]; then
    stage clips "$PY" scripts/bench/fullsize.py clips "$OUT" "$SIZE"
    stage cache "$PY" -m wanjax.data cache "$OUT/clips" --model "$OUT/model" --out "$OUT/latents" --fps keep \
      --frames 5 --size "$SIZE"
  fi
  if [ "$A" = grpo ]; then
    stage train killed "${TRAIN[@]}"
    stage resume "${TRAIN[@]}"
    grep -q "^resume  " "$OUT/grpo-resume.log" || fail "the second start did not resume: $OUT/grpo-resume.log"
  else stage train "${TRAIN[@]}"; fi
  stage export "$PY" -m wanjax.export "$RUN" --format comfyui
  for file in "$RUN"/export/comfyui/*.safetensors; do LORA+=(--lora "$file"); done
  stage sample "$PY" -m wanjax.sample --model "$OUT/model" "${LORA[@]}" --prompt "a red circle moving left" \
    --steps 4 --frames 5 --height "$H" --width "$W" --out "$OUT/samples/$A"
  rm -rf "$RUN/checkpoints" "$RUN"/export # room for the next one
done
"$PY" scripts/bench/fullsize.py table "$OUT"
