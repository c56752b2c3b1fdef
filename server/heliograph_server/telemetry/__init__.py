"""Metrics, logs and traces of a daemon. Serving does not depend on them."""
