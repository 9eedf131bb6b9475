"""Drives env actors: a drop-in vector env, an asynchronous pool, the command line."""

if __name__ != "envbus.runner":
    raise ImportError("import envbus.runner, not runner: two copies would keep two registries")
