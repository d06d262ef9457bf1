"""Numbers instead of text: prompts whose embeddings, classes or scores workers compute."""
