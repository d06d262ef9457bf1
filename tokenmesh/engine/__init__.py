"""The engine as a library: no bus, no Redis, no asyncio, nothing of the services."""
