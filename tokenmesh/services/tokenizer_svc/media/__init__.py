"""Media of a prompt: sources -> fetch -> images -> pixels in the blob store -> placeholders."""
