#!/usr/bin/env bash
# One machine, CPU, the short way: `mstar-tp serve` starts the frontend and two ranks and watches over them.
#
#   launch/serve_cpu.sh MODEL_DIR [name=ADAPTER_DIR ...]
#
# TP=4 launch/serve_cpu.sh … changes the number of ranks; PORT=8000 the API's port. The ranks share the
# machine's cores between them.
set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -ge 1 ] || die "usage: launch/serve_cpu.sh MODEL_DIR [name=ADAPTER_DIR ...]"
ensure_venv demo

model="$1"
shift
adapters=()
for adapter in "$@"; do
  adapters+=(--lora "$adapter")
done
exec "$(dirname "$PY")/mstar-tp" serve "$model" --device cpu --tp "${TP:-2}" \
  --port "${PORT:-8000}" ${adapters[@]+"${adapters[@]}"}
