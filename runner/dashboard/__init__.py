"""The same as `envbus top` in a browser: one page, live, for whoever has its token.

Figures come from `envbus.runner.monitoring`; `envbus.runner.cli` starts it.
"""
