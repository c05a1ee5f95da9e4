"""``mstar-tp merge``: adapters added into the base model's weights."""
