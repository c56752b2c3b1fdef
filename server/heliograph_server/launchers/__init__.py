"""What starts the daemons of a pool and restarts them. None elects or places by itself: Ray does.

Kubernetes does the same by its manifests and needs nothing of this folder. Imports `config` alone.
"""
