"""Connections of sessions beside gRPC's, over TCP: the port, and the transfers of bytes there."""
