"""Programs whose session goes from daemon to daemon while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import heliograph as hg

SIZE = 32
STEPS = 40
#: A tensor that travels in transfers, or in shared memory.
LARGE = np.arange(300_000, dtype=np.float32)


def training() -> hg.Graph:
    """A step of gradient descent on |w * x - y|, with weights of the graph as well."""
    g = hg.Graph()
    x, y = g.input("x", (SIZE,), "f32"), g.input("y", (SIZE,), "f32")
    w = g.variable("w", (SIZE,), "f32")
    scale = g.weight("scale", np.linspace(0.01, 0.1, SIZE, dtype=np.float32))
    loss = w * x - y
    g.output("loss", hg.assign(w, w - scale * loss * x))
    return g


def batches(seed: int = 3) -> list[dict[str, np.ndarray[Any, Any]]]:
    """The inputs of every step."""
    made = np.random.default_rng(seed)
    return [{name: made.standard_normal(SIZE, np.float32) for name in "xy"} for _ in range(STEPS)]


def calm(url: str) -> list[bytes]:
    """The results of all steps on one daemon."""
    with hg.connect(url, progress=None) as session:
        plan = session.compile(training())
        return [plan.run(**one)["loss"].tobytes() for one in batches()]


class InThread:
    """A function that runs in a thread while a context lasts, again and again."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="beside")
        #: How often it ran to its end.
        self.count = 0

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._function()
                self.count += 1
        except BaseException as error:
            self._error = error

    def __enter__(self) -> InThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
