"""Spaces as plain data: on the wire, in memory, and what their elements look like. Pure.

Knows no env and no process; env actors, clients and runners import it, and `actors/arrays/`.
"""
