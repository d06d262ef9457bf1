"""The parts of bench_ops: the batch language, a piece of work for each op, limits, timing."""
