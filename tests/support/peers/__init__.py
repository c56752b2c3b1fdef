"""Peers: other implementations of the same model, which our definitions and figures are compared with."""
