"""The command `envbus`: options, reports, and the jobs that it runs.

Nobody imports it but `bench/entry.py`.
"""
