"""`BusVectorEnv`: lock-step over the engine, with Gymnasium's interface.

Users import `BusVectorEnv` and `make_vec` from `envbus.runner`.
"""
