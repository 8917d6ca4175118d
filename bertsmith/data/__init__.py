"""From text files to training examples, in NumPy only: nothing here imports torch."""
