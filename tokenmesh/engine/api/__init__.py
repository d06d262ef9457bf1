"""Define what the engine is asked and what it answers; messages carry these values as they are."""
