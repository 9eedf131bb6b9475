"""Benchmarks: envbus side by side with the libraries a user would pick instead.

`entry.py` begins the `envbus` command; nothing else is imported from here, but by the command.
"""
