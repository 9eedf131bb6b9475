"""The other side of a broker: the session of a peer (pure), the worker, the client.

Actors and external clients import `session.py` and `worker.py`; users import `Client`.
"""
