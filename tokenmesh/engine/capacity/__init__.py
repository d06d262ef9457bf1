"""Define which divisions of a model over devices fit their memory, and how fast they would be."""
