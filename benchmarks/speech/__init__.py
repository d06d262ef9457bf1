"""Recordings of synthetic speech, and what transcribes them besides a mesh."""
