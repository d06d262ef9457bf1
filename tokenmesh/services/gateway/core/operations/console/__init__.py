"""The console: a page that shows the mesh, its requests and its tenants, and chats with models."""
