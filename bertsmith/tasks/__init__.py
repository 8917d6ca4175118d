"""The fine-tuning tasks of the paper: data files, labels, model inputs and metrics."""
