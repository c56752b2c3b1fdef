"""Compiled plans and their runs, on one device, several devices or several hosts.

Imports `scheduler`, `resources`, `exchange`.
"""
