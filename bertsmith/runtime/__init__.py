"""Device, precision, threads and memory of the process, and inference batches."""
