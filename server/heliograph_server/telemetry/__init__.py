"""What an operator sees of a daemon: metrics, logs and traces. Nothing of it is needed to serve."""
