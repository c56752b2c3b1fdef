"""Small HTML for notebooks: cards, tables, bars and histograms, from plain values.

Knows nothing of sessions or graphs; their own packages make views of these parts.
"""
