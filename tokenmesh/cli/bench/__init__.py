"""`tokenmesh bench`: load for an OpenAI-compatible server, with the flags of `vllm bench serve`."""
