"""Drafts: tokens that are likely to follow, and how many of them pay."""
