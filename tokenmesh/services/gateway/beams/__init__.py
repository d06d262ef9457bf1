"""Beam search: kept in the gateway, one token of every beam at a time from the workers."""
