"""Tool parsers, one module a format."""
