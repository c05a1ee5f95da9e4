# Shell functions that launch/ and scripts/ share. Sourced, not run; expects bash with `set -euo pipefail`.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() {
  if [ -t 1 ]; then printf '\033[1m==> %s\033[0m\n' "$*"; else printf '==> %s\n' "$*"; fi
}
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Print the newest Python on PATH that this project runs on.
find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  die "no Python 3.11 or newer on PATH: install one, or name it with PYTHON=/path/to/python3"
}

# ensure_venv [EXTRA]: set PY to the Python of a virtual environment that holds the project, with that extra.
# Uses the active environment ($VIRTUAL_ENV) or makes .venv. A stamp makes a second call free until
# pyproject.toml or constraints.txt changes. What `dev` installs is enough for every extra.
ensure_venv() {
  local extra="${1:-}" venv="${VIRTUAL_ENV:-$ROOT/.venv}" wanted base have
  if [ ! -x "$venv/bin/python" ]; then
    base="$(find_python)"
    say "Making $venv with $("$base" --version)"
    "$base" -m venv "$venv" || die "$base cannot make a virtual environment (on Debian: install python3-venv)"
  fi
  PY="$venv/bin/python"
  wanted="$(cd "$ROOT" && "$PY" -c 'import hashlib, pathlib, sys
text = b"".join(pathlib.Path(p).read_bytes() for p in ("pyproject.toml", "constraints.txt"))
print(hashlib.sha256(text + sys.argv[1].encode()).hexdigest())' "$ROOT")"
  for have in "${extra:-*}" dev; do
    # shellcheck disable=SC2086  # without an extra, the stamp of any: each brings what serving needs
    if cat "$venv"/.mstar-tp-$have 2>/dev/null | grep -qxF "$wanted"; then return; fi
  done
  say "Installing mstar-tp${extra:+[$extra]} into $venv (the first time downloads a few hundred MB)"
  "$PY" -m pip install --disable-pip-version-check -c "$ROOT/constraints.txt" -e "$ROOT${extra:+[$extra]}" ||
    die "pip could not install the pinned packages: see its last lines above"
  printf '%s\n' "$wanted" >"$venv/.mstar-tp-${extra:-serve}"
}

# Print a TCP port that nothing on this machine listens on now.
free_port() {
  "$PY" -c 'import socket
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    print(s.getsockname()[1])'
}

# ranks_of MODEL_OR_CONFIG [flags]: print how many ranks those arguments ask for.
ranks_of() {
  "$PY" -c 'import argparse, sys
from mstar_tp.common.errors import ConfigError
from mstar_tp.config.server_flags import add_config_arguments, config_from_args
parser = argparse.ArgumentParser()
add_config_arguments(parser)
try:
    print(config_from_args(parser.parse_args()).engine.tensor_parallel_size)
except ConfigError as error:
    sys.exit(f"error: {error}")' "$@"
}

# code_of PID: wait until a child has ended, through signals; its exit code. 0 where bash has lost it, as
# bash 5.2 now and then loses that of a child that ends while a trap runs: it was asked to end then.
code_of() {
  local code=0
  while kill -0 "$1" 2>/dev/null; do
    wait "$1" 2>/dev/null || true # a signal ends a wait early
  done
  wait "$1" || code=$? # bash keeps the code of a child that has ended
  [ "$code" -ge 0 ] || code=0
  return "$code"
}

# supervise FRONTEND_PID RANKS_PID: wait until both have ended. Ctrl-C and SIGTERM stop the frontend, which
# stops the ranks in order; if one of the two fails, the other is stopped too.
supervise() {
  local frontend="$1" ranks="$2" code=0 asked=
  # shellcheck disable=SC2064  # the pid of now is meant
  trap "asked=1; kill -TERM $frontend 2>/dev/null || true" INT TERM
  while kill -0 "$frontend" 2>/dev/null && kill -0 "$ranks" 2>/dev/null; do
    # Not wait -n: a signal amid one can lose the code of a child that ends just then.
    sleep 0.2 &
    wait "$!" || true
  done
  if kill -0 "$frontend" 2>/dev/null; then
    kill -TERM "$frontend" 2>/dev/null || true
  elif ! wait "$frontend"; then
    kill -TERM "$ranks" 2>/dev/null || true
  fi
  code_of "$ranks" || code=$?
  # Ctrl-C reaches torchrun too, whose code then says no more than that, however well its ranks ended.
  [ -z "$asked" ] || code=0
  code_of "$frontend" || code=$?
  return "$code"
}

# await_ranks PID: wait until the ranks have ended, through Ctrl-C and SIGTERM.
await_ranks() {
  local code=0 asked=
  trap 'asked=1; say "stopping once the frontend has let running requests finish"' INT TERM
  code_of "$1" || code=$?
  [ -z "$asked" ] || code=0 # as above
  return "$code"
}
