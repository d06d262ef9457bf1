"""Define what operators of a mesh ask: health, metrics, traces, the console, commands."""
