"""What subscribers outside of the mesh are told of the prefix cache. Start at `stream.py`."""
