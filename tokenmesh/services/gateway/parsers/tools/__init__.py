"""Tool calls: a module for each way to write them, and the families of models as data."""
