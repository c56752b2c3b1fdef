"""Compositions of ops that several importers of models share.

Each takes and returns values of a graph, by the public functions of `heliograph` alone.
"""
