"""The native kind: our own decoder with switches for each family, and its program of C kernels."""
