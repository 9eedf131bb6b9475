"""Arrays that runner and actors share: observations, rows, infos, actions.

Knows no env and no process; env actors, clients and runners import it.
"""
