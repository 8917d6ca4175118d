"""Reproduces the paper's tables and figures as experiments that share and reuse their stages."""
