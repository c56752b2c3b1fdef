"""Parts that several importers of models share: compositions of ops, names, plans by shapes.

Each composition takes and returns values of a graph, by the public functions of `heliograph` alone.
"""
