"""Env runners in processes of their own: what `EnvRunnerGroup` is made of.

Users import `EnvRunnerGroup` and what it returns from `envbus.runner`; nobody else imports it.

Reading order: `protocol.py`, `host.py`, `joining.py`, `sample_memory.py`, `rounds.py`,
and `env_runner_group.py`.
"""
