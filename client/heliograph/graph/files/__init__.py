"""Graphs and weights in files: `hg.save` and `hg.load`, weights mapped from files, and files that
are replaced whole."""
