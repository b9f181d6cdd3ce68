#!/usr/bin/env bash
# A SLURM cluster of GPU machines; slurm.sbatch is the job that runs there.
# Usage: NODES=… GPUS=… bash scripts/launch/slurm.sh [--dry_run] ACTION [wanjax.train flags]
#   run      submit; the job is requeued when preempted or near its time limit
#   status   show the queue     logs     the last lines of the run          delete   cancel it
set -euo pipefail
NAME=${NAME:-wanjax}
NODES=${NODES:-1}
GPUS=${GPUS:-8}                 # per machine, one process each
TIME=${TIME:-24:00:00}
PARTITION=${PARTITION:-} ACCOUNT=${ACCOUNT:-} # empty: the cluster's default
GRACE=${GRACE:-300}             # seconds to save before the time limit
CPUS=${CPUS:-8}                 # per process
LOGS=${LOGS:-runs/slurm}        # on a folder all machines see, like this checkout and its .venv

source "$(dirname "$0")/common.sh" "$@"
case $ACTION in
  run)
    options=("--job-name=$NAME" "--nodes=$NODES" "--cpus-per-task=$CPUS")
    options+=("--ntasks-per-node=$GPUS" "--gpus-per-node=$GPUS")
    options+=("--time=$TIME" "--signal=TERM@$GRACE" --requeue --open-mode=append "--output=$LOGS/$NAME-%j.log")
    [ -z "$PARTITION" ] || options+=("--partition=$PARTITION")
    [ -z "$ACCOUNT" ] || options+=("--account=$ACCOUNT")
    run mkdir -p "$LOGS"
    run sbatch "${options[@]}" scripts/launch/slurm.sbatch "${FLAGS[@]}" ;;
  status) run squeue --me "--name=$NAME" ;;
  logs) run tail -n 100 "$LOGS/$NAME-${JOB:?set JOB to the number sbatch printed}.log" ;;
  delete) run scancel --me "--name=$NAME" ;;
  *) fail "action is '$ACTION', expected run, status, logs or delete" ;;
esac
