"""Towers: one file a family, each from pixels to embeddings of the language model's width."""
