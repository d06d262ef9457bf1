"""Less common ways to generate: beam search, batches of chats, tensors as prompts, SageMaker."""
