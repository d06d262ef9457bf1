"""Module trees of transformers that answer with numbers. Start at `build.py`."""
