"""A runner's processes as a group: start, connect, ask, watch, start again, stop; env actors.

Imported by the engine, by vector envs, pools, groups and policy workers.
"""
