"""Device, precision, threads and memory of the current process."""
