"""`hg.aio`: the same names for asyncio.

    async with hg.aio.connect("grpc://127.0.0.1:7070") as session:
        plan = await session.compile(g)
        outputs = await plan.run(x=array)
        future = plan.submit(x=array)           # a plain call
        outputs = await future.result(timeout=1.0)   # or: await future

Graphs are built in the same way. Calls that wait are coroutines; cancelling the task cancels the
work on the server. Objects belong to the event loop that opened their session.
"""

from heliograph._base.reservation import Reservation
from heliograph.aio.connection import connect
from heliograph.aio.device import Device, Event, Stream
from heliograph.aio.plan import Plan
from heliograph.aio.run_future import FeedFuture, RunFuture
from heliograph.aio.session import Session, copy_plan
from heliograph.aio.tensor import Buffer, Tensor, WriteFuture

__all__ = [
    "Buffer",
    "Device",
    "Event",
    "FeedFuture",
    "Plan",
    "Reservation",
    "RunFuture",
    "Session",
    "Stream",
    "Tensor",
    "WriteFuture",
    "connect",
    "copy_plan",
]
