"""Towers, one file for each family: pixels to embeddings of the language model's width."""
