"""The version that hellos compare: ranks and frontend of one instance run the same code."""

from importlib.metadata import version

VERSION = version("mstar-tp")
