"""Attacks on a gateway, and what others notice of them."""
