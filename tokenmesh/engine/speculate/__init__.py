"""Drafts of tokens, which one step verifies together."""
