"""Trees of transformers that are read as native decoders, where both compute the same."""
