"""The experiments, one file each. They never train: each says what to make, and tells of it."""
