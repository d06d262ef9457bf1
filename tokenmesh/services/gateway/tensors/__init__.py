"""Tensors that clients send: files of torch and of safetensors, read without running anything."""
