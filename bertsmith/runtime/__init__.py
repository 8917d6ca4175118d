"""The machine: device, precision, threads."""
