"""Child processes: start, watch, kill, take apart what they died of, and leave none behind.

The runner's groups of workers, bridges and gateways import `process_group.py` and `pipe.py`.
"""
