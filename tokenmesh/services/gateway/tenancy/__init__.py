"""Tenants: whose a request is, what it may, and what it is counted for."""
