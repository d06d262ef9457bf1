"""Stores: where a transfer process keeps images outside of the memory of workers.

What a store brings is what was put under that key, or it is a miss: each image has a checksum.
"""
