#!/usr/bin/env bash
# One machine, one GPU a rank (NCCL), under plain torchrun.
#
#   launch/torchrun_gpu.sh MODEL_DIR|CONFIG.yaml --tp GPUS [flags of mstar-tp serve]
#
# CUDA_VISIBLE_DEVICES chooses the GPUs: rank i takes the i-th. Needs a CUDA build of torch.
set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -ge 1 ] || die "usage: launch/torchrun_gpu.sh MODEL_DIR|CONFIG.yaml --tp GPUS [flags of mstar-tp serve]"
ensure_venv
bin="$(dirname "$PY")"
set -- "$@" --device cuda
ranks="$(ranks_of "$@")"
address="tcp://127.0.0.1:$(free_port)" # loopback needs no secret

"$PY" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < int(sys.argv[1]))' "$ranks" ||
  die "torch sees fewer than $ranks GPUs: install a CUDA build of torch, or lower --tp"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # only quiets torchrun: each rank sets its own share

"$bin/mstar-tp" frontend "$@" --listen "$address" &
frontend=$!
# In a session of its own, so that Ctrl-C reaches the frontend alone, which ends the ranks in order.
setsid "$bin/torchrun" --standalone --nproc-per-node "$ranks" \
  -m mstar_tp.worker "$@" --frontend "$address" &
supervise "$frontend" $!
