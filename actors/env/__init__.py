"""One env actor: makes envs, holds them in slots, steps, resets and renews them.

Runners import `source.py`, and what they need for envs in their own process.
"""
