"""MCP servers: which a request may use, what they offer, and calls of their tools."""
