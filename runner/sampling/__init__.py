"""`EnvRunner`: drives a pool or a bridge with policies; by columns, and by env and agent.

Users import `EnvRunner` from `envbus.runner`; groups and the command line import it.
"""
