"""What becomes of envs: requests, results, faults, new lives, seeds.

One engine for vector envs and pools; imported by these only.
"""
