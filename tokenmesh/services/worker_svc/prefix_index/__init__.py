"""The worker's side of the prefix index: says what it holds, gives reservations back."""
