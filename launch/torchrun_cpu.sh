#!/usr/bin/env bash
# One machine, CPU, under plain torchrun: the frontend in a process of its own, the ranks in torchrun's.
#
#   launch/torchrun_cpu.sh [MODEL_DIR|CONFIG.yaml] [flags of mstar-tp serve]
#
# Without arguments: launch/serving.yaml, the demo model on two ranks. The frontend and every rank get
# the same arguments, because they must arrive at the same configuration.
set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ensure_venv
bin="$(dirname "$PY")"
if [ $# -eq 0 ]; then
  cd "$ROOT" # serving.yaml names the demo from there
  set -- launch/serving.yaml
fi
ranks="$(ranks_of "$@")"
address="tcp://127.0.0.1:$(free_port)" # loopback needs no secret

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # only quiets torchrun: each rank sets its own share

"$bin/mstar-tp" frontend "$@" --listen "$address" &
frontend=$!
# In a session of its own, so that Ctrl-C reaches the frontend alone, which ends the ranks in order.
setsid "$bin/torchrun" --standalone --nproc-per-node "$ranks" \
  -m mstar_tp.worker "$@" --frontend "$address" &
supervise "$frontend" $!
