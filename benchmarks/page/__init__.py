"""docs/benchmarks.md, made from the files in benchmarks/results/."""
