"""What runs in a library's own environment: its adapter, a file each, envs and networks.

It needs the library, NumPy and Gymnasium, and imports no other folder of the benchmark. All of
these may import from it.
"""
