"""The Responses API: its request, its items, its events. Generation itself is the chat's."""
