"""Engines that start and restart the daemons of a pool. Elections and placement are Ray's.

Kubernetes does the same by its manifests and needs nothing of this folder. Imports only `config`.
"""
