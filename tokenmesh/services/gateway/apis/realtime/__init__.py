"""OpenAI's Realtime API: conversations over a websocket, in text."""
