"""Placement by the prefix index in Redis: how much of a prompt each worker holds, and the cost."""
