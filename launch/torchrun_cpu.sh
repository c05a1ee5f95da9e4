#!/usr/bin/env bash
# One machine, CPU, under plain torchrun: the frontend in a process of its own, the ranks in torchrun's.
#
#   launch/torchrun_cpu.sh [CONFIG.yaml]        default: launch/serving.yaml, the demo model on two ranks
#
# torchrun starts the ranks again when one dies (three times here); the frontend outlives that.
set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ensure_venv demo
bin="$(dirname "$PY")"
cd "$ROOT"
config="${1:-launch/serving.yaml}"
address="tcp://127.0.0.1:$(free_port)" # loopback needs no secret

"$bin/mstar-tp" frontend "$config" --listen "$address" &
frontend=$!
trap 'kill -TERM "$frontend" 2>/dev/null; wait "$frontend" || true' EXIT

"$bin/torchrun" --standalone --max-restarts 3 --nproc-per-node "$(ranks_of "$config")" \
  -m mstar_tp.worker "$config" --frontend "$address"
