"""KV of other workers: the process that moves images, who may read which, and who fetches."""
