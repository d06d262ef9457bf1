"""The runner of a GPU: rows that stay on the device, one copy each way a step, CUDA graphs."""
