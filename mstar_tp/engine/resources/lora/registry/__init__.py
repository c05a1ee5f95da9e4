"""Which adapters are known and served, and how they are loaded, validated and unloaded."""
