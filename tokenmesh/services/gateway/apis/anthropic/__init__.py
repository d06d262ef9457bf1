"""Anthropic's Messages API: its request and response bodies, translated from and to a chat."""
