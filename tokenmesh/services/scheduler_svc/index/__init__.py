"""Placement by the prefix index in Redis: who holds the most of a prompt, and what it costs."""
