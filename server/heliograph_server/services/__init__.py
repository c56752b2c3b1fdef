"""The gRPC services: thin servicers, one module each, that turn messages into calls of the core.

Every handler is a coroutine that writes its own responses, so that cancellation always arrives as
CancelledError at an await, and one decorator (`refusals`) serves them all.
"""
