"""Records to tables, figures and verdicts on targets.

Only the command imports from it.
"""
