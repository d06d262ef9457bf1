"""Harmony: the format of gpt-oss, where every message names its channel and its recipient."""
