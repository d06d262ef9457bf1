"""Reasoning parsers, by the way their formats are built."""
