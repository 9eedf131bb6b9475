"""Env runners in processes of their own: what `EnvRunnerGroup` is made of.

Reading order: `protocol.py`, `host.py`, `shares.py`, `joining.py`, `sample_memory.py`,
`runner_process.py`, `rounds.py`, `upkeep.py`, and `../env_runner_group.py`.
"""
