"""Facts of the daemon's process that help to find why it is slow (`heliograph doctor`)."""

from __future__ import annotations

import asyncio

from heliograph.graph.digests import processors
from heliograph.transport.allocator import facts_here
from heliograph_proto import ZSTD
from heliograph_proto.codec import packing


def server_facts(why_not_shared: str = "") -> dict[str, str]:
    """The facts of ListDevicesResponse; called on the event loop that serves."""
    loop = type(asyncio.get_running_loop()).__module__
    return {
        **facts_here(),
        "processors": str(processors()),
        "event_loop": "uvloop" if loop.startswith("uvloop") else "asyncio",
        "zstd": "installed" if ZSTD in packing.features() else "not installed",
        "shared_memory": why_not_shared or "on",
    }
