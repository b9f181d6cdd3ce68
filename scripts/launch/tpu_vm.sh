#!/usr/bin/env bash
# Cloud TPU VMs (v4, v5e, v5p, v6e) through queued resources, one slice or several.
# Usage: NAME=… ZONE=… TPU=… bash scripts/launch/tpu_vm.sh [--dry_run] ACTION [wanjax.train flags]
#   create   request the slices and wait until they are active    setup    copy the committed files
#   run      train on all hosts; exits 0, 1 or 42                 logs     last lines of a host's log
#   delete   release everything
set -euo pipefail
NAME=${NAME:-wanjax}            # of the queued resource and its slice (several: NAME-0, NAME-1, …)
ZONE=${ZONE:-us-east5-b}
PROJECT=${PROJECT:-}            # empty: the one set in gcloud
TPU=${TPU:-v6e-32}              # accelerator type: v4-…, v5litepod-…, v5p-…, v6e-…
SLICES=${SLICES:-1}
SPOT=${SPOT:-1}                 # 1: cheap but preemptible; 0: on demand
RESERVED=${RESERVED:-0}         # 1: use your reservation (with SPOT=0)
NETWORK=${NETWORK:-default}     # its firewall must allow TCP between the hosts
WORKER=${WORKER:-0}             # host whose log to show, or all
POLL=${POLL:-60}                # seconds between polls of the queue

source "$(dirname "$0")/common.sh" "$@"
case $TPU in
  v4-*) RUNTIME=tpu-ubuntu2204-base ;;
  v5litepod-*) RUNTIME=v2-alpha-tpuv5-lite ;;
  v5p-*) RUNTIME=v2-alpha-tpuv5 ;;
  v6e-*) RUNTIME=v2-alpha-tpuv6e ;;
  *) fail "TPU is '$TPU', expected v4-N, v5litepod-N, v5p-N or v6e-N; for newer: tpu_mig.sh, gke_xpk.sh" ;;
esac
where=("--zone=$ZONE")
[ -z "$PROJECT" ] || where+=("--project=$PROJECT")
queue=(gcloud compute tpus queued-resources) vm=(gcloud compute tpus tpu-vm)
nodes=("$NAME") shape=("--node-id=$NAME")
if [ "$SLICES" -gt 1 ]; then
  mapfile -t nodes < <(seq -f "$NAME-%g" 0 $((SLICES - 1)))
  shape=("--node-count=$SLICES" "--node-prefix=$NAME")
fi
case $ACTION in
  create)
    options=("--network=$NETWORK")
    [ "$SPOT" = 0 ] || options+=(--spot)
    [ "$RESERVED" = 0 ] || options+=(--reserved)
    run "${queue[@]}" create "$NAME" "${where[@]}" "--accelerator-type=$TPU" \
      "--runtime-version=$RUNTIME" "${shape[@]}" "${options[@]}"
    while :; do
      state=$(run "${queue[@]}" describe "$NAME" "${where[@]}" '--format=value(state.state)')
      case $state in
        gcloud*) echo "$state"; break ;; # dry run
        ACTIVE) break ;;
        FAILED | SUSPEND* | DELET*) echo "queued resource $NAME is $state; delete it" >&2; exit 42 ;;
      esac
      sleep "$POLL"
    done ;;
  setup)
    run git archive --format=tar.gz "--output=$ARCHIVE" HEAD
    for node in "${nodes[@]}"; do
      run "${vm[@]}" scp "$ARCHIVE" "$node:wanjax.tar.gz" "${where[@]}" --worker=all
      run "${vm[@]}" ssh "$node" "${where[@]}" --worker=all "--command=$REMOTE_SETUP"
    done ;;
  run)
    line=$(remote_train --coordinator=auto "${FLAGS[@]}")
    for node in "${nodes[@]}"; do
      start "${vm[@]}" ssh "$node" "${where[@]}" --worker=all "--command=$line"
    done
    finish ;;
  logs)
    run "${vm[@]}" ssh "${nodes[0]}" "${where[@]}" "--worker=$WORKER" \
      '--command=tail -n 100 wanjax/logs/train.log' ;;
  delete) run "${queue[@]}" delete "$NAME" "${where[@]}" --force --quiet ;;
  *) fail "action is '$ACTION', expected create, setup, run, logs or delete" ;;
esac
