"""Faults of connections: a proxy that breaks them at every message, and programs that must end typed."""
