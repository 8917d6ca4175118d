"""Inference with trained models, and inspection of models, runs and stores."""
