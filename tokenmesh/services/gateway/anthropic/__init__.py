"""Anthropic's names, in and out: the bodies of /v1/messages. They stop here."""
