"""Describe and compare models, stores, runs and other artifacts."""
