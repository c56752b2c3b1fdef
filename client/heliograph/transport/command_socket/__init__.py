"""The messages of the command stream over a unix socket, between a client and a server of one host.

The server makes the connection and hands over one end, as it does with memory (`memory.proto`). The
gRPC call stays open: its end is the session's.
"""
