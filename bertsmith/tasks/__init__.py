"""The tasks of the paper: their files, labels, inputs and scores. It never trains."""
