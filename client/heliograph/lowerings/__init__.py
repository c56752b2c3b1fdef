"""Parts that several importers of models share: compositions of ops, and names.

Each composition takes and returns values of a graph, by the public functions of `heliograph` alone.
"""
