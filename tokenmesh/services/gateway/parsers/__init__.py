"""Parsers: what a model wrote, told apart into reasoning, content and tool calls."""
