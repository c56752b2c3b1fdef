"""gRPC and shared memory: channels, calls, and the blocking and asyncio shells.

May import `core` and `procedures`.
"""

import os

# gRPC's core reads this variable while it is loaded. Its handlers of forks work only while no thread
# is in a call, which a session always is: otherwise they print a line, or start threads in the child
# that crash. The environment stays as it was.
if "GRPC_ENABLE_FORK_SUPPORT" in os.environ:
    import grpc as _grpc
else:
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    try:
        import grpc as _grpc  # noqa: F401
    finally:
        del os.environ["GRPC_ENABLE_FORK_SUPPORT"]
