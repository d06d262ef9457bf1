"""Define what trees hold next to a language model: towers, positions of media, cross attention."""
