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
say "pytest"
pytest "$@"
