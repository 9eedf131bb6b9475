"""Spaces as plain data, and arrays that runner and actors share: rows, infos, actions.

Knows no env and no process; env actors, clients and runners import it.
"""
