"""Typed messages, sockets, broker and supervision. Knows nothing of reinforcement learning."""

if __name__ != "envbus.bus":
    raise ImportError("import envbus.bus, not bus: two copies would keep two registries")
