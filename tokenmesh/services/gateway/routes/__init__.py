"""HTTP routes: thin; each reads, asks the gateway, and shapes the answer."""
