"""Constraints on what a model writes, made of what a request asks for."""
