"""The layers of a decoder: weights plus a forward that calls the kernels."""
