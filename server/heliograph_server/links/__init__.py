"""Connections to other daemons over gRPC, for `exchange` and `pool`.

Imports `exchange` and the client's transport.
"""
