"""The parts of replay.py: the trace, its prompts, the faults, and the report."""
