"""A window into runs: figures of all that works on this host, who shows them, and who asks.

Whoever owns processes registers in `registry.py`; `envbus.runner.cli` shows what is told.
"""
