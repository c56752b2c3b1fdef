"""The threads of a loaded model, which take the runs of its queue."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

from heliograph_server.gateways.kserve.batching import BatchPolicy
from heliograph_server.gateways.kserve.dispatcher import Dispatcher
from heliograph_server.gateways.kserve.tensors import Array

SECONDS = 20.0


def test_an_idle_thread_takes_what_another_one_left_in_the_queue() -> None:
    """The window of a request was another thread's to wait for, which computes now."""
    begun, go_on, other_came = threading.Semaphore(0), threading.Event(), threading.Event()
    runs = list[tuple[int, ...]]()

    def run(feeds: Any) -> dict[str, Array]:
        runs.append(feeds["x"].shape)
        begun.release()
        # Two runs hold the threads while others gather, and the third the thread that waited.
        width = runs[-1][1]
        if width in (1, 2):
            assert go_on.wait(SECONDS)
        elif width == 4:
            assert other_came.wait(SECONDS)
        elif width == 5:
            other_came.set()
        return {"y": feeds["x"]}

    async def ask(model: Dispatcher) -> None:
        def infer(width: int) -> asyncio.Task[dict[str, Array]]:
            # Forms that differ share no run.
            return asyncio.create_task(model.infer({"x": np.zeros((1, width), np.float32)}))

        asked = list[asyncio.Task[dict[str, Array]]]()
        for width in (1, 2):
            asked.append(infer(width))
            assert await asyncio.to_thread(begun.acquire, timeout=SECONDS)
        asked += [infer(3) for _ in range(4)]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait_for(asyncio.gather(*asked), SECONDS)
        # So many shared the last run that a window is waited for now.
        assert runs[2:] == [(4, 3)]
        await asyncio.wait_for(asyncio.gather(infer(4), infer(5)), SECONDS)

    model = Dispatcher("model", run, BatchPolicy(sizes=(8,), window_seconds=0.05), instances=2)
    try:
        asyncio.run(ask(model))
    finally:
        go_on.set()
        other_came.set()
        model.close()
