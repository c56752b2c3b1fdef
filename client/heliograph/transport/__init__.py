"""gRPC and shared memory: channels, calls, and the blocking and asyncio shells.

May import `core` and `procedures`.
"""
