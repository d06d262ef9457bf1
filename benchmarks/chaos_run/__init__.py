"""The parts of `benchmarks.chaos`: a mesh of processes, what befalls it, what it must say."""
