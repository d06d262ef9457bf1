"""Cohere's Chat API, version 2: its bodies, translated from and to a chat."""
