"""Transcriptions and translations of recordings: the form, the clips, the formats."""
