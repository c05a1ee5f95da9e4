#!/usr/bin/env bash
# Several machines: run this on each of them, with the same arguments and the same paths.
#
#   export MSTAR_TP_SECRET=…            16 characters or more, the same everywhere; keys are made from it
#   HEAD=10.0.0.1 NODES=2 NODE_RANK=0 IFACE=eth0 launch/torchrun_nodes.sh ARGUMENTS
#
# ARGUMENTS  MODEL_DIR or CONFIG.yaml, then flags of `mstar-tp serve`, such as --tp 16
# HEAD       address of the machine with NODE_RANK 0, which also runs the frontend and the API
# NODES      how many machines; each runs tensor_parallel_size / NODES ranks
# NODE_RANK  this machine's number, from 0
# IFACE      network interface that the machines reach each other by
# RDZV_PORT, WIRE_PORT   ports on HEAD, 29500 and 29501 unless set: torchrun's meeting point, and the frontend's
# MAX_RESTARTS  how often the ranks are started again after one of them died, 3 unless set
#
# Control messages are encrypted (CURVE). Collectives (gloo, NCCL) are not: use a network that is yours.
set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -ge 1 ] || die "no model given: see the top of this file"
for name in HEAD NODES NODE_RANK IFACE; do
  [ -n "${!name:-}" ] || die "$name is not set: see the top of this file"
done
[ -n "${MSTAR_TP_SECRET:-}${MSTAR_TP_SECRET_FILE:-}" ] ||
  die "MSTAR_TP_SECRET is not set: give every machine the same secret of 16 characters or more"
ensure_venv
bin="$(dirname "$PY")"
ranks="$(ranks_of "$@")"
[ $((ranks % NODES)) -eq 0 ] || die "--tp is $ranks, which $NODES machines cannot share evenly"

wire="${WIRE_PORT:-29501}"
export GLOO_SOCKET_IFNAME="$IFACE" NCCL_SOCKET_IFNAME="$IFACE"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # only quiets torchrun: each rank sets its own share

# In a session of its own, so that Ctrl-C reaches the frontend alone, which ends the ranks in order.
torchrun=(setsid "$bin/torchrun" --nnodes "$NODES" --nproc-per-node $((ranks / NODES))
  --max-restarts "${MAX_RESTARTS:-3}" --rdzv-backend c10d --rdzv-id mstar-tp --rdzv-endpoint "$HEAD:${RDZV_PORT:-29500}"
  -m mstar_tp.worker "$@" --frontend "tcp://$HEAD:$wire" --order-bind "tcp://$IFACE")
if [ "$NODE_RANK" != 0 ]; then
  # Asked to stop, it waits for the frontend, which lets running requests finish and then ends every rank.
  "${torchrun[@]}" &
  await_ranks $!
  exit
fi
"$bin/mstar-tp" frontend "$@" --listen "tcp://$IFACE:$wire" &
frontend=$!
"${torchrun[@]}" &
supervise "$frontend" $!
