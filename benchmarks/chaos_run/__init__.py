"""The parts of `benchmarks.chaos`: a mesh of processes, its faults, the expected output."""
