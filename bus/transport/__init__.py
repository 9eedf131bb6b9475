"""How frames reach a peer: ZeroMQ sockets, socketpairs, streams on this host, and CURVE keys.

Brokers, peers and processes import it; it knows of none of them.
"""
