"""For operators: traces, metrics, health, commands to workers and the console."""
