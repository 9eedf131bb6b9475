"""Adapters of libraries' own collectors, which sample with a policy; a file each.

Beside the library they need `bench/adapters` only, and the adapter's process alone imports them.
"""
