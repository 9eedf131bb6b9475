"""Simulators that drive themselves: what they say to a bridge, and how they say it."""
