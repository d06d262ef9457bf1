"""Embeddings, classes and scores: prompts that are answered with numbers."""
