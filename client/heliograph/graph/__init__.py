"""The graph library: what `hg.Graph` and `hg.Value` are, and graphs in files.

Imports `heliograph_proto` alone.
"""
