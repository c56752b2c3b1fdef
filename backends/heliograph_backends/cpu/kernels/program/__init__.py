"""Native programs as plain Python values: what a caller asks for, and the words that say it.

Imports no numba.
"""
