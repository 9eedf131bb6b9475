"""Makes simulators that call us look like envs: episodes of any number of clients."""
