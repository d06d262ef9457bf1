"""The Files API of OpenAI: uploads of tenants."""
