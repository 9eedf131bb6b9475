"""Env runners in processes of their own: what `EnvRunnerGroup` is made of.

Reading order: `protocol.py`, `host.py`, `joining.py`, `sample_memory.py`, `rounds.py`,
and `env_runner_group.py`.
"""
