"""Padding buckets: runs of any batch use the plans of a few sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

import heliograph as hg
from heliograph.onnx.elements import Array
from heliograph.onnx.importing import Program
from heliograph.onnx.ports import Known, Port, Wire

#: The most sizes: each may have a plan.
MOST_SIZES = 16


@dataclass(frozen=True, slots=True)
class Batches:
    """The sizes that a batch is padded to, rising, the inputs that have the batch as dimension 0,
    and its symbol, if it has one."""

    sizes: tuple[int, ...]
    inputs: frozenset[str]
    symbol: str | None

    def padded(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the feeds with their last rows repeated up to one of the sizes, and the batch.

        A batch beyond the largest size, or without rows, stays. Raises InvalidInputError.
        """
        counts = {
            name: len(feed) if isinstance(feed, np.ndarray) and feed.ndim else -1
            for name, feed in feeds.items()
            if name in self.inputs
        }
        if len(set(counts.values())) != 1 or -1 in counts.values():
            raise hg.InvalidInputError(
                f"the inputs have batches of {', '.join(f'{n} ({name:.40})' for name, n in counts.items())}",
                advice="all inputs with the batch as dimension 0 need the same one",
            )
        (count,) = set(counts.values())
        size = next((one for one in self.sizes if one >= count), count)
        if size == count or count == 0:
            return dict(feeds), count
        return {name: _longer(feed, size) if name in counts else feed for name, feed in feeds.items()}, count


def batches_of(batch: object, shapes: Mapping[str, tuple[int | str | None, ...] | None]) -> Batches:
    """Return the batches of a model whose inputs declare these shapes. `batch`: one size or some.
    Raises InvalidArgumentError."""
    sizes = tuple(batch) if isinstance(batch, (Sequence, Set)) else (batch,)
    if not 0 < len(sizes) <= MOST_SIZES or not all(type(one) is int and one > 0 for one in sizes):
        raise hg.InvalidArgumentError(f"batch is {batch!r:.80}; it must be 1 to {MOST_SIZES} sizes above 0")
    firsts = {name: shape[0] for name, shape in shapes.items() if shape and not isinstance(shape[0], int)}
    symbols = {one for one in firsts.values() if isinstance(one, str)}
    if not firsts or len(symbols) > 1:
        declared = ", ".join(f"{name:.40}: {list(shape or ())}" for name, shape in shapes.items())
        raise hg.InvalidArgumentError(
            f"there is no one batch: no symbol, or several, are dimension 0 of the inputs ({declared:.400})",
            advice="leave batch out: each shape then has a plan of its own",
        )
    return Batches(tuple(sorted(set(sizes))), frozenset(firsts), next(iter(symbols), None))


def _longer(array: Array, size: int) -> Array:
    return np.concatenate([array, np.broadcast_to(array[-1:], (size - len(array), *array.shape[1:]))])


#: For each output with a batch, its axis and how many of its places belong to a row.
Cuts = dict[str, tuple[int, int]]


def cuts_of(program: Program, larger: Program, size: int) -> Cuts:
    """Find the batch in the outputs by the shapes for a batch of `size` and for one row more.

    Raises UnsupportedError for an output that a batch decides in another way.
    """
    found: Cuts = {}
    for name, port in program.outputs.items():
        cut = _cut(port, larger.outputs[name], size)
        if cut is None:
            raise hg.UnsupportedError(
                f"output {name!r:.80} depends on the size of the batch, so a padded batch changes it",
                advice="compile the model without batch=...",
            )
        if cut[1]:
            found[name] = cut
    return found


def _cut(port: Port, other: Port, size: int) -> tuple[int, int] | None:
    """Return an output's axis and its places of a row, 0 without a batch; None if that is not all."""
    if isinstance(port, Wire) and isinstance(other, Wire):
        pairs = zip(port.spec.shape, other.spec.shape, strict=True)
        changed = [(axis, have, more) for axis, (have, more) in enumerate(pairs) if have != more]
        if not changed:
            return 0, 0
        ((axis, have, more), *rest) = changed
        each = more - have
        return (axis, each) if not rest and each > 0 and have == each * size else None
    if isinstance(port, Known) and isinstance(other, Known):
        return (0, 0) if np.array_equal(port.array, other.array) else None
    return (0, 0) if port is None and other is None else None
