"""The gRPC services: thin servicers, one module each.

Every handler is a coroutine that writes its own responses, so that cancellation always arrives as
CancelledError at an await, and one decorator (`errors`) serves them all.
"""
