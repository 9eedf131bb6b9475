"""The broker: pure rules of requests and peers (`core.py`), and the loop that performs them.

Owners of peers import `loop.py`; `standalone.py` is the command `envbus broker`.
"""
