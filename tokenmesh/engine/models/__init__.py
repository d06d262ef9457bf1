"""Models: what a checkpoint holds, and the kinds of model that run it."""
