"""What `benchmarks/outage.py` asks for beside completions, and how it judges the hit rate."""
