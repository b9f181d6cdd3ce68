#!/usr/bin/env bash
# A TPU slice (v5p, v6e, 7x) as a Compute Engine managed instance group with a workload policy.
# Usage: PROJECT=… NAME=… ZONE=… TPU=… TOPOLOGY=… bash scripts/launch/tpu_mig.sh [--dry_run] ACTION [wanjax.train flags]
#   create   policy, template, group    hosts   write the list of hosts      setup    copy the committed files
#   run      train; exits 0, 1 or 42    logs    last lines of a host's log   delete   release everything
set -euo pipefail
NAME=${NAME:-wanjax} ZONE=${ZONE:-us-central1-c} PROJECT=${PROJECT:-}
TPU=${TPU:-7x}                   # v5p, v6e or 7x, in machines of four chips
TOPOLOGY=${TOPOLOGY:-2x2x2}      # chips; the group has product / 4 machines
MODEL=${MODEL:-SPOT}             # STANDARD, SPOT, FLEX_START or RESERVATION_BOUND
RESERVATION=${RESERVATION:-}     # reservation name, for MODEL=RESERVATION_BOUND
NETWORK=${NETWORK:-default}      # its firewall must allow TCP between the hosts
DISK=${DISK:-200GB}
PORT=${PORT:-8482}               # of process 0
WORKER=${WORKER:-0}              # host whose log to show
HOSTS=${HOSTS:-runs/$NAME.hosts} # one line "id machine address" per host

source "$(dirname "$0")/common.sh" "$@"
case $TPU in
  v5p) MACHINE=ct5p-hightpu-4t IMAGE=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e ;;
  v6e) MACHINE=ct6e-standard-4t IMAGE=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e ;;
  7x) MACHINE=tpu7x-standard-4t IMAGE=ubuntu-accel-2404-amd64-tpu-tpu7x ;;
  *) fail "TPU is '$TPU', expected v5p, v6e or 7x; for others use tpu_vm.sh" ;;
esac
[[ $TOPOLOGY =~ ^[0-9]+(x[0-9]+)+$ ]] || fail "TOPOLOGY is '$TOPOLOGY', expected for example 4x4 or 2x2x2"
[ -n "$PROJECT" ] || fail "PROJECT is empty; set it to your Google Cloud project"
SIZE=$((${TOPOLOGY//x/*} / 4)) REGION=${ZONE%-*}
zone=("--project=$PROJECT" "--zone=$ZONE") region=("--project=$PROJECT" "--region=$REGION")
group=(gcloud compute instance-groups managed) policy=(gcloud compute resource-policies)
template=(gcloud compute instance-templates) ssh=(gcloud compute ssh "${zone[@]}" --quiet)
worker_id=http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-id
ids=() machines=() addresses=()
if [[ $ACTION =~ ^(setup|run|logs)$ ]]; then
  [ -f "$HOSTS" ] || fail "no file $HOSTS; run the action hosts, or write lines: id machine address"
  while read -r id machine address; do ids+=("$id") machines+=("$machine") addresses+=("$address"); done < <(sort -n "$HOSTS")
  [ "${ids[*]}" = "$(seq -s ' ' 0 $((SIZE - 1)))" ] || fail "$HOSTS has hosts '${ids[*]}', expected 0 to $((SIZE - 1))"
fi
case $ACTION in
  create)
    options=("--provisioning-model=$MODEL")
    [ "$MODEL" = STANDARD ] || options+=(--instance-termination-action=DELETE)
    [ -z "$RESERVATION" ] || options+=(--reservation-affinity=specific "--reservation=$RESERVATION")
    run "${policy[@]}" create workload-policy "$NAME" "${region[@]}" --type=HIGH_THROUGHPUT "--accelerator-topology=$TOPOLOGY"
    run "${template[@]}" create "$NAME" "--project=$PROJECT" "--machine-type=$MACHINE" "--image-family=$IMAGE" \
      --image-project=ubuntu-os-accelerator-images "--network=$NETWORK" "--boot-disk-size=$DISK" \
      --maintenance-policy=TERMINATE --scopes=cloud-platform "${options[@]}"
    run "${group[@]}" create "$NAME" "${zone[@]}" "--template=$NAME" "--size=$SIZE" --default-action-on-vm-failure=do-nothing \
      "--workload-policy=projects/$PROJECT/regions/$REGION/resourcePolicies/$NAME" ;;
  hosts)
    list=("${group[@]}" list-instances "$NAME" "${zone[@]}" '--format=value(instance.basename())')
    ask="echo \$(curl -sf -H Metadata-Flavor:Google $worker_id) \$(hostname) \$(hostname -I | cut -d' ' -f1)"
    if [ "$DRY_RUN" = 1 ]; then
      run "${list[@]}"
      run "${ssh[@]}" MACHINE "--command=$ask" # once for each machine in the list
      exit
    fi
    mapfile -t machines < <(run "${list[@]}")
    mkdir -p "$(dirname "$HOSTS")"
    for machine in "${machines[@]}"; do run "${ssh[@]}" "$machine" "--command=$ask" </dev/null; done >"$HOSTS"
    cat "$HOSTS" ;;
  setup)
    run git archive --format=tar.gz "--output=$ARCHIVE" HEAD
    for machine in "${machines[@]}"; do
      run gcloud compute scp "${zone[@]}" --quiet "$ARCHIVE" "$machine:wanjax.tar.gz"
      run "${ssh[@]}" "$machine" "--command=$REMOTE_SETUP"
    done ;;
  run)
    for i in "${ids[@]}"; do
      place=("--coordinator=${addresses[0]}:$PORT" "--num_processes=$SIZE" "--process_id=$i")
      start "${ssh[@]}" "${machines[i]}" "--command=$(remote_train "${place[@]}" "${FLAGS[@]}")"
    done
    finish ;;
  logs) run "${ssh[@]}" "${machines[WORKER]}" '--command=tail -n 100 wanjax/logs/train.log' ;;
  delete)
    run "${group[@]}" delete "$NAME" "${zone[@]}" --quiet
    run "${template[@]}" delete "$NAME" "--project=$PROJECT" --quiet
    run "${policy[@]}" delete "$NAME" "${region[@]}" --quiet ;;
  *) fail "action is '$ACTION', expected create, hosts, setup, run, logs or delete" ;;
esac
