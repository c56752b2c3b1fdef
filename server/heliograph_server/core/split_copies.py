"""Copies between the splits of a run: ahead in threads of their own, or rows alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any

import numpy as np

from heliograph_backends import access
from heliograph_backends.contract import Tensor, host_bytes
from heliograph_proto.types import TensorType
from heliograph_server.core.scheduling.between import Move, Moves, Place


class CopyAhead:
    """A thread for each of some devices that copies what its next split needs while one computes."""

    def __init__(self, devices: int) -> None:
        self._threads = ThreadPoolExecutor(devices, "heliograph-copy")

    def __repr__(self) -> str:
        return "<CopyAhead>"

    def run(self, tensors: Mapping[Place, Tensor]) -> RunCopies:
        """The copies of one run, which is to be closed."""
        return RunCopies(tensors, self._threads)

    def close(self) -> None:
        """Ends the thread. Never during a run."""
        self._threads.shutdown()


class RunCopies:
    """The copies of one run. As a context, it waits at the end for those that were begun."""

    def __init__(self, tensors: Mapping[Place, Tensor], threads: ThreadPoolExecutor | None = None) -> None:
        self._tensors = tensors
        self._threads = threads
        self._begun: dict[Place, Future[None]] = {}
        self._is_over = False

    def __enter__(self) -> RunCopies:
        return self

    def __exit__(self, *_: object) -> None:
        wait(self._begun.values())
        # What could not get a thread may still be queued, and its memory holds other values by then.
        self._is_over = True

    def before(self, moves: Moves) -> None:
        """Makes the copies of a split, and begins those that may be made while it runs."""
        for place in moves.reads if self._begun else ():
            # If one was begun, then by the split before this one on its device, or an earlier one.
            if (begun := self._begun.get(place)) is not None:
                begun.result()
        for move in moves.copies:
            self._copy(move)
        for move in moves.ahead:
            assert self._threads is not None
            self._begun[move.target] = self._threads.submit(self._copy_ahead, move)

    def _copy_ahead(self, move: Move) -> None:
        if not self._is_over:
            self._copy(move)

    def _copy(self, move: Move) -> None:
        source, target = self._tensors[move.source], self._tensors[move.target]
        if move.rows is None:
            access.copy(source, target)
        else:
            copy_rows(source, target, self._tensors[move.rows])


def copy_rows(source: Tensor, target: Tensor, names: Tensor) -> None:
    """Copies those rows, along the first axis, of a contiguous tensor that the elements of `names` say.

    Numbers that are no rows are left to the op that reads them, whose error they are.
    """
    numbers = np.empty(names.type.shape, names.type.dtype.numpy)
    access.read(names, 0, host_bytes(numbers))
    for first, behind in runs_of(numbers, source.type.shape[0]):
        access.copy(_rows(source, first, behind), _rows(target, first, behind))


def runs_of(numbers: np.ndarray[Any, Any], rows: int) -> list[tuple[int, int]]:
    """Rows as ranges that do not touch: the first of each, and the one behind its last."""
    wanted = np.unique(numbers[(numbers >= 0) & (numbers < rows)])
    if not wanted.size:
        return []
    edges = [0, *(np.flatnonzero(np.diff(wanted) != 1) + 1), wanted.size]
    return [(int(wanted[start]), int(wanted[end - 1]) + 1) for start, end in pairwise(edges)]


def _rows(tensor: Tensor, first: int, behind: int) -> Tensor:
    """Some rows of a contiguous tensor."""
    sizes = tensor.type.shape
    type = TensorType(tensor.type.dtype, (behind - first, *sizes[1:]))
    one = TensorType(tensor.type.dtype, (1, *sizes[1:])).nbytes if math.prod(sizes) else 0
    return Tensor(type, tensor.buffer, tensor.offset_bytes + first * one)
