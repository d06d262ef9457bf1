"""Blocks of keys and values: which are free, which prompt each holds, who reads it."""
