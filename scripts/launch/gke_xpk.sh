#!/usr/bin/env bash
# Google Kubernetes Engine through xpk: a run becomes one JobSet, with a Job for each TPU slice or GPU pool.
# Usage: CLUSTER=… NAME=… DEVICE=… bash scripts/launch/gke_xpk.sh [--dry_run] ACTION [wanjax.train flags]
#   cluster  create the cluster        run      submit; the JobSet restarts on exit code 42 and 127 to 255
#   status   show the run              logs     of all pods        delete   end the run, keep the cluster
set -euo pipefail
NAME=${NAME:-wanjax}            # of the run: lower case, at most 40 characters
CLUSTER=${CLUSTER:-wanjax} ZONE=${ZONE:-us-east5-b}
PROJECT=${PROJECT:-}            # empty: the one set in gcloud
DEVICE=${DEVICE:-v6e-32}        # TPU such as v6e-32, tpu7x-4x4x4; GPU such as h100-mega-80gb-8, h200-141gb-8
COUNT=${COUNT:-1}               # TPU slices or GPU machines
BASE=${BASE:-python:3.12}       # base image; the committed files are added to it
CAPACITY=${CAPACITY:---spot}    # for a new cluster: --spot, --on-demand or --reservation=NAME
RESTARTS=${RESTARTS:-50}
GRACE=${GRACE:-300}             # seconds to save after SIGTERM
PRIORITY=${PRIORITY:-medium}

source "$(dirname "$0")/common.sh" "$@"
where=("--cluster=$CLUSTER" "--zone=$ZONE")
[ -z "$PROJECT" ] || where+=("--project=$PROJECT")
case $DEVICE in
  v[456]* | tpu*) EXTRA=tpu place=(--coordinator=auto) device=("--tpu-type=$DEVICE" "--num-slices=$COUNT") ;;
  *-[1-8]) EXTRA=gpu place=() device=("--device-type=$DEVICE" "--num-nodes=$COUNT") ;; # xpk sets NNODES, NODE_RANK
  *) fail "DEVICE is '$DEVICE', expected a TPU such as v6e-32 or a GPU such as h100-mega-80gb-8" ;;
esac
for flag in "${FLAGS[@]}"; do
  # xpk writes the command into YAML, where a shell reads it: only plain words survive unchanged.
  [[ $flag =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] ||
    fail "flag '$flag' has characters that xpk would change; set it in a config file"
done
case $ACTION in
  cluster) run xpk cluster create "${where[@]}" "${device[@]}" "$CAPACITY" ;;
  run)
    train=(python -u -m wanjax.train "${place[@]}" "${FLAGS[@]}")
    source=${TMPDIR:-/tmp}/wanjax-source # a clean copy: .venv and runs/ stay out of the image
    run rm -rf "$source"
    run git clone -q --depth=1 "file://$PWD" "$source"
    run xpk workload create "--workload=$NAME" "${where[@]}" "${device[@]}" \
      "--base-docker-image=$BASE" "--script-dir=$source" \
      "--max-restarts=$RESTARTS" "--termination-grace-period-seconds=$GRACE" "--priority=$PRIORITY" \
      "--command=pip install -q -e .[$EXTRA] && ${train[*]}" ;;
  status) run xpk workload list "${where[@]}" "--filter-by-job=$NAME" ;;
  logs)
    pods=jobset.sigs.k8s.io/jobset-name=$NAME
    run kubectl logs "--selector=$pods" --prefix --tail=100 --max-log-requests=512 ;;
  delete) run xpk workload delete "--workload=$NAME" "${where[@]}" --force ;;
  *) fail "action is '$ACTION', expected cluster, run, status, logs or delete" ;;
esac
