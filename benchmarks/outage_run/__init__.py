"""What `benchmarks/outage.py` asks for besides completions, and how it judges the hit rate."""
