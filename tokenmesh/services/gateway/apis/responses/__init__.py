"""OpenAI's Responses API. A response is event-sourced: its log is replayed to continue it."""
