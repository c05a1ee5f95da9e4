#!/usr/bin/env bash
# One machine, CPU, the short way: `mstar-tp serve` starts the frontend and the ranks and watches over them.
#
#   launch/serve_cpu.sh MODEL_DIR|CONFIG.yaml [flags of mstar-tp serve]
#   launch/serve_cpu.sh my-model --lora sql=adapters/sql --port 8080
#
# Two ranks, which share the machine's cores, unless the flags say otherwise.
set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -ge 1 ] || die "usage: launch/serve_cpu.sh MODEL_DIR|CONFIG.yaml [flags of mstar-tp serve]"
ensure_venv

model="$1"
shift
exec "$(dirname "$PY")/mstar-tp" serve "$model" --device cpu --tp 2 "$@" # a later flag overrides
