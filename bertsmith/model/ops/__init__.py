"""Kernels, fused layers and padding that the model is built from."""
