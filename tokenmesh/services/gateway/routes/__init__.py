"""The HTTP routes of all APIs but Realtime: each gets what it needs from the Gateway."""
