"""`ActorPool`: first ready, first served over the engine; and its dict side.

Users import `ActorPool` from `envbus.runner`; samplers import `pool.py`.
"""
