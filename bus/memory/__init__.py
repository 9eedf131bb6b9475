"""Memory that processes share: files without a name, the arena, what the machine has left.

May be imported by all that hold arrays or start processes.
"""
