"""A validated body becomes an Ask: the only place that reads OpenAI's request fields."""
