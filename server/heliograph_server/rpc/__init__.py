"""The gRPC services: thin servicers, one module each.

Every handler is a coroutine that writes its own responses. So cancellation always arrives as a
CancelledError at an await, and one decorator (`errors.refusals`) handles the errors of all.
"""
