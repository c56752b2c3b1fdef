"""The scheduler: from a graph and the properties of devices to splits and copies. Pure.

Imports no other folder.
"""
