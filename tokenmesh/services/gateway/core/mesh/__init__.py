"""The mesh behind the gateway: calls of other services, streams of tokens and their recovery."""
