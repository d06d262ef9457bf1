"""What bench_ops is made of: the batch language, a piece of work for each op, limits, timing."""
