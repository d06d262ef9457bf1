"""The parts of `benchmarks/outage.py`: other requests, and the judge of the hit rate."""
