"""The command `envbus chaos`: envs, actors, driver and sockets are broken on purpose, and audited.

It uses the runner as a user does, and only `runner/cli` imports from it.
"""
