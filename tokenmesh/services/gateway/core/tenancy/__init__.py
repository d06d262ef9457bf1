"""Tenants: API keys, limits, upload quotas and usage."""
