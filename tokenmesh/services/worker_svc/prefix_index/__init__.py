"""The worker's side of the prefix index: writes its blocks, releases reservations."""
