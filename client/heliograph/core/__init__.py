"""The client's side of the protocol, without input or output: commands, credit, futures.

May import `graph`. Shells in `transport` drive it. Nothing here waits, reads a clock or opens a
socket.
"""
