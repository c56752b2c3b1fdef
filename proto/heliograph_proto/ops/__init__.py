"""The op table: one file an op family, each with the rows and the rules of its ops, joined in `table`.

Imports the types, the errors and nothing else of ours.
"""
