"""Grammars: what the next token may be, so that the output follows a schema, regex or EBNF."""
