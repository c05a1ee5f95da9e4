#!/usr/bin/env bash
# One machine, one GPU a rank (NCCL), under plain torchrun.
#
#   launch/torchrun_gpu.sh CONFIG.yaml          with `device: cuda` and tensor_parallel_size = GPUs to use
#
# CUDA_VISIBLE_DEVICES chooses the GPUs: rank i takes the i-th. Needs a CUDA build of torch.
set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -eq 1 ] || die "usage: launch/torchrun_gpu.sh CONFIG.yaml"
ensure_venv demo
bin="$(dirname "$PY")"
config="$1"
address="tcp://127.0.0.1:$(free_port)"

"$PY" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < int(sys.argv[1]))' "$(ranks_of "$config")" ||
  die "torch sees fewer GPUs than $config has ranks: install a CUDA build of torch or lower tensor_parallel_size"

"$bin/mstar-tp" frontend "$config" --listen "$address" &
frontend=$!
trap 'kill -TERM "$frontend" 2>/dev/null; wait "$frontend" || true' EXIT

"$bin/torchrun" --standalone --max-restarts 3 --nproc-per-node "$(ranks_of "$config")" \
  -m mstar_tp.worker "$config" --frontend "$address"
