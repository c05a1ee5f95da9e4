#!/usr/bin/env bash
# The project's test command: installs what is missing, then lint, format, types and tests.
#
#   scripts/test.sh                      everything
#   scripts/test.sh tests/unit -k slots  arguments go to pytest
#
# Works from any folder, on a fresh machine (Python 3.11+) and again in seconds. Uses $VIRTUAL_ENV
# when one is active, else .venv.
set -euo pipefail
# shellcheck source=../launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"
cd "$ROOT"
ensure_venv dev

# pytest, mypy and ruff of this environment, whatever else is on PATH; ranks that tests start find it too.
bin="$(dirname "$PY")"
export PATH="$bin:$PATH"

say "ruff check"
ruff check .
say "ruff format"
ruff format --check .
say "mypy"
mypy
if [ $# -gt 0 ]; then
  say "pytest $*"
  exec pytest "$@"
fi
# Tests that start processes of their own get the machine to themselves; the others share it, as many at
# a time as there are cores, up to four (each holds torch and transformers).
processes=(tests/e2e tests/distributed)
code=0
say "pytest ${processes[*]}"
pytest "${processes[@]}" || code=$?
workers="$(($(nproc) < 4 ? $(nproc) : 4))"
say "pytest, the others, $workers at a time"
pytest -n "$workers" --dist worksteal "${processes[@]/#/--ignore=}" || code=$?
exit "$code"
