"""The command line, a small file a verb: the only place that prints. It never computes."""
