"""What runs in the child processes: env actors and what they say to the runner."""

if __name__ != "envbus.actors":
    raise ImportError("import envbus.actors, not actors: two copies would keep two registries")
