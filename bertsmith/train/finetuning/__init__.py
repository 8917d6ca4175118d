"""Fine-tuning on a labelled task."""
