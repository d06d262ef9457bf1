"""OpenAI's API: request models, errors, request builders, response writers and routes."""
