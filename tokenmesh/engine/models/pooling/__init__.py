"""Models that answer prompts with numbers: embeddings, classes, scores, one for each token or all.

Start at `kind.py`, which reads from a checkpoint's files what it pools, without torch.
"""
