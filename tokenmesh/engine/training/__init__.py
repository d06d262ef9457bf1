"""Fits a head that drafts for a model to what the model answers."""
