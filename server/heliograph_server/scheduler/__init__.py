"""The scheduler, pure: from a graph and what devices say of it to splits and copies.

Imports no other folder.
"""
