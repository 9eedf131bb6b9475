"""How a process becomes an actor: of this host, or joined from another one.

Entry points; runners name them, nobody else imports them.
"""
