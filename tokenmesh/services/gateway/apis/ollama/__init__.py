"""Ollama's API as a translation: its requests become chats, completions and embeddings."""
