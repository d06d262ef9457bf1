"""Define what the engine knows about one stream, from its arrival to its end."""
