"""How long training takes with a library's own vector envs, and with envbus in their place.

Nobody imports it but `bench/__main__.py`; the programs run in the environments of their libraries.
"""
