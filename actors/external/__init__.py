"""Simulators that drive themselves: what they say to a bridge, and how they say it.

Users import clients from `envbus.actors`, and messages from `protocol.py`. The runner
imports messages, agreement, elements and errors, and verbs to replay recordings.
"""
