"""The chaos run: envs, actors, driver and sockets are broken on purpose; what came is audited."""
