"""Messages as values and as bytes: their types, the codec, framing, limits.

Imports `bus/errors.py` and its like only; all other folders may import all of it.
"""
