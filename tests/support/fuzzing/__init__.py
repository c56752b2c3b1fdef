"""Fuzzing of the wire: recorded conversations of every method, mutated and played against a daemon."""
