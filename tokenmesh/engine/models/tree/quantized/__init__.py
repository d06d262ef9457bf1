"""Codes of the weights of trees: those of a checkpoint, or those that weights are rounded to."""
