"""``mstar-tp bench``: kernels, step, serving, churn, prefix and scale, measured on this machine.

One file an idea; ``report`` is what every part hands back, prints and writes. Nothing that serves
imports this package, and ``flags`` imports no torch before a part runs.
"""
