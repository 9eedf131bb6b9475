"""Looks at other people's clients and servers: where a connection stops, what breaks the protocol.

Speaks the protocol by itself, frame by frame, so that what is found is not hidden by a client's
patience. Leaves out the clients that simulators use (`envbus.actors.external`).
"""
