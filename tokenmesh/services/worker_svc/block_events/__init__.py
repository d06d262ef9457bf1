"""Block events: the prefix cache for subscribers outside of the mesh. Start at `stream.py`."""
