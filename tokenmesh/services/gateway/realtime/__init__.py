"""Realtime: conversations over a websocket, in the event shapes of OpenAI's Realtime API."""
