"""``python -m mstar_tp`` is the ``mstar-tp`` command."""

import sys

from mstar_tp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
