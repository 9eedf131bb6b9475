"""Decides about children, processes or envs: who is started when, hangs, or is given up. Pure.

Whoever owns children imports it: `bus/process/`, the gateway, and the runner's groups of workers.
"""
