"""The OpenAPI document: what FastAPI cannot know, since routes read and write bodies themselves."""
