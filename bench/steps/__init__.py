"""Comparisons of libraries that step or sample envs: rates, starts, actors, recovery, one step.

The command imports all of it, reports its variants and cases; it knows neither.
"""
