"""Transports: how a transfer process reads slots of another one's arena.

Each listens at an address, and reads from one. A question is msgpack behind its length; the answer
begins with a byte that says whether the slots may be read.
"""
