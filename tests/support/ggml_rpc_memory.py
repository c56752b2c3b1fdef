"""Random graphs over one piece of memory, and what one node after the other leaves in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from ggml_rpc_client import F32, RpcClient

from heliograph_server.gateways.ggml_rpc import wire

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
ELEMENTS = 256


@dataclass(frozen=True)
class _Place:
    """A matrix in the memory, in elements: its rows are `step` apart."""

    at: int
    rows: int
    columns: int
    step: int

    @property
    def span(self) -> range:
        return range(self.at, self.at + (self.rows - 1) * self.step + self.columns)

    def of(self, memory: Array) -> Array:
        return np.lib.stride_tricks.as_strided(
            memory[self.at :], (self.rows, self.columns), (4 * self.step, 4)
        )


class RandomMemory:
    """Memory of a client with random whole numbers, in which random nodes read and write."""

    def __init__(self, client: RpcClient, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._client = client
        self._values = self._random.integers(-9, 10, ELEMENTS).astype(np.float32)
        self._tensor = client.array(self._values)
        self._at = (self._tensor.data - client.base) // 4

    def compute(self, nodes: int) -> None:
        made = [self._node() for _ in range(nodes)]
        self._client.compute(*made)

    def found(self) -> Array:
        return self._client.get(self._tensor).ravel()

    def expected(self) -> Array:
        return self._values

    def _node(self) -> wire.Tensor:
        rows, columns = int(self._random.integers(1, 5)), int(self._random.integers(1, 9))
        op = str(self._random.choice(["add", "sub", "cpy", "sqr"]))
        sources = [self._place(rows, columns) for _ in range(2 if op in ("add", "sub") else 1)]
        target = self._target(op, rows, columns, sources)
        values = [one.of(self._values).copy() for one in sources]
        # Numbers stay small and whole, so that each sum is exact.
        with np.errstate(over="ignore"):
            result = {
                "add": lambda: values[0] + values[1], "sub": lambda: values[0] - values[1],
                "cpy": lambda: values[0], "sqr": lambda: values[0] * values[0],
            }[op]()  # fmt: skip
        target.of(self._values)[:] = result
        given = [self._described(one) for one in sources]
        return self._described(target, *given, op=op)

    def _place(self, rows: int, columns: int, *, dense: bool = False) -> _Place:
        step = columns if dense else int(self._random.choice([columns, columns + 1, 16]))
        span = (rows - 1) * step + columns
        return _Place(int(self._random.integers(0, ELEMENTS - span)), rows, columns, step)

    def _target(self, op: str, rows: int, columns: int, sources: list[_Place]) -> _Place:
        """A place apart from the sources, or that of the first one."""
        first = sources[0]
        others = set().union(*(one.span for one in sources[1:]))
        if (
            op != "cpy"
            and first.step == columns
            and self._random.random() < 0.3
            and not others & {*first.span}
        ):
            return first
        taken = others | {*first.span}
        while True:
            found = self._place(rows, columns, dense=op != "cpy")
            if not taken & {*found.span}:
                return found

    def _described(self, place: _Place, *sources: wire.Tensor, op: str = "none") -> wire.Tensor:
        return self._client.tensor(
            F32,
            (place.columns, place.rows),
            *sources,
            op=op,
            nb=(4, 4 * place.step),
            at=4 * (self._at + place.at),
        )
