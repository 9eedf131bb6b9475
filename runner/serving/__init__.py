"""A policy server without training: answers simulators of a bridge, and may record what they do.

Only `runner/cli` imports from it.
"""
