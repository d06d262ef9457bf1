"""What trees hold beside a language model: towers, positions of media, cross attention."""
