"""Heads: layers that guess the tokens after the next one from the hidden states of a model."""
