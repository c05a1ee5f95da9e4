#!/usr/bin/env bash
# See it work: one small base model and four adapters, served by two ranks on this machine's CPU.
#
#   launch/demo.sh            install, start, ask everyone the same questions, print a table, stop
#   launch/demo.sh --serve    the same, but leave the server up and print how to talk to it (Ctrl-C stops it)
#   launch/demo.sh --retrain  train the demo model again first (about 15 minutes on one core)
#
# Needs Python 3.11+ and no GPU. Safe to run again, from any folder. The demo model is committed in launch/demo/.
set -euo pipefail
# shellcheck source=lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

serve=no retrain=no
for arg in "$@"; do
  case "$arg" in
    --serve) serve=yes ;;
    --retrain) retrain=yes ;;
    -h | --help)
      sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) die "unknown argument $arg: wanted --serve, --retrain or --help" ;;
  esac
done

ensure_venv demo
demo="$ROOT/launch/demo"
work="$ROOT/build"
mkdir -p "$work"

if [ "$retrain" = yes ]; then
  demo="$work/demo"
  say "Training the demo model into $demo"
  "$PY" "$ROOT/scripts/make_demo_model.py" "$demo"
fi
"$PY" "$ROOT/scripts/demo_check.py" "$demo" ||
  die "the demo model in $demo is damaged: restore the folder, or run launch/demo.sh --retrain"

adapters=()
for folder in "$demo"/adapters/*/; do
  adapters+=(--lora "$(basename "$folder")=${folder%/}")
done

port="$(free_port)"
log="$work/demo-server.log"
say "Starting mstar-tp serve on port $port with 2 ranks (log: $log)"
"$(dirname "$PY")/mstar-tp" serve "$demo/model" --tp 2 --device cpu --max-model-len 512 \
  --served-model-name base --host 127.0.0.1 --port "$port" "${adapters[@]}" >"$log" 2>&1 &
server=$!

stop_server() {
  trap - EXIT INT TERM
  if kill -TERM "$server" 2>/dev/null; then
    say "Stopping the server"
    wait "$server" || true
  fi
}
trap stop_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$PY" "$ROOT/scripts/demo_requests.py" --url "http://127.0.0.1:$port" --server-pid "$server" || {
  tail -n 30 "$log" >&2
  die "the demo did not finish; the server's last lines are above, all of them in $log"
}

if [ "$serve" = yes ]; then
  "$PY" "$ROOT/scripts/demo_requests.py" --url "http://127.0.0.1:$port" --how-to
  wait "$server" || die "the server stopped: see $log"
fi
