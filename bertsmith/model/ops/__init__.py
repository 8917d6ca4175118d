"""Building blocks of the model: linear layers, dropout, norms, attention kernels and losses."""
