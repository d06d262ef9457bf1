"""LoRA adapters: reading them, the layers that they change, and which of them a worker holds."""
