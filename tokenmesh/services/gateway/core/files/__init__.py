"""Uploads: their content in JetStream, their descriptions in Redis, and what deletes orphans."""
