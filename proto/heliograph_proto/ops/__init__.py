"""The op table: one module per op family, with its rows and rules; `table` joins them.

Within the package it imports only the types and the errors.
"""
