"""The ``mstar-tp`` command line: its subcommands, and the flags of a serving configuration."""
