"""Isolated environments, processes in them, how often things are timed, and result files.

All comparisons (`steps`, `requests`) and reports import from it; it imports from none of them.
"""
