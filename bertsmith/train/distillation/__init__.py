"""Distillation: training of a small student model from the outputs of a larger teacher."""
