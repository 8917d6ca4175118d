"""The panel: one table that compares any models on the same tasks."""
