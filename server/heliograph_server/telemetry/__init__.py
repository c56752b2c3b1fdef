"""What an operator sees of a daemon: metrics and logs. Nothing of it is needed to serve."""
