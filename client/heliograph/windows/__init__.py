"""Convolutions and pools under `hg.`, with the field's names and order of arguments.

Imports `graph` and `lowerings`.
"""
