"""Building blocks of the model: linear layers, dropout, norms, padding and fused kernels."""
