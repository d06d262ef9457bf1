"""Images of a prompt: fetch, decode, store the pixels as blobs, expand the placeholders."""
