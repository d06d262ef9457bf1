"""Pool messages in the worker: many engine requests, one answer. Start at `desk.py`."""
