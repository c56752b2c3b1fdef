"""Engines: what places the daemons of a pool on the nodes of a cluster, and restarts them.

None is written here. Ray (`engines.ray`) places, detects and restarts; Kubernetes does so by its manifests,
and needs nothing of this package.
"""
