"""Importing this module makes ``tests/support`` importable for scripts that are run as files."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
