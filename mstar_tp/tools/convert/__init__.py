"""``mstar-tp convert``: adapters of other formats, written as PEFT folders."""
