"""The paper's experiments, each as one command, at a size one can afford. It never prints."""
