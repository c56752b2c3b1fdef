"""Gradients of graphs: `hg.grad` walks from a loss back to variables, by one rule for each op row.

Imports `graph` and `functions`.
"""
