"""Comparisons of single requests and their answers: the bus, policy workers, the bridge.

Only the command imports from it.
"""
