"""Other engines on the same model and machine, each in processes of its own."""
