"""Reasoning: the parsers, and the families of models as data."""
