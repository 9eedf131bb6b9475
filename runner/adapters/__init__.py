"""Env actors and policies under other libraries' interfaces; each module needs its library.

Users import its modules. Nobody else does, but `runner/extras.py`, by name and when asked to.
"""
