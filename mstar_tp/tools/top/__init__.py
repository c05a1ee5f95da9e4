"""``mstar-tp top``: a running server's ranks, slots, queues and rates, live on a terminal."""
