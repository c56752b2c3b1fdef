"""A tensor in a notebook: its type and place, a corner of its elements, statistics of a sample.

At most `SAMPLE_BYTES` and a corner are read, whatever the tensor's size: pieces at equal distances
of a contiguous tensor, else the corner alone. A tensor whose elements are not computed yet, or not
in time, is shown without them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from heliograph._base.views.objects import look
from heliograph.core.arrays import byte_view
from heliograph.core.effects import Procedure
from heliograph.notebook.elements import Markup, card, facts, heading, histogram, note, number, table, warning
from heliograph.procedures.transfer import read
from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError
from heliograph_proto.quantization import blocks
from heliograph_proto.quantization.blocks import dequantize
from heliograph_proto.types import DType, size_text

if TYPE_CHECKING:
    from heliograph._base.tensor import TensorBase

Array = np.ndarray[Any, Any]

#: The bytes that a view reads of a tensor for its statistics, in pieces of these bytes.
SAMPLE_BYTES, PIECE_BYTES = 256 * 2**10, 4096
#: The rows and columns of the corner.
ROWS, COLUMNS = 6, 8
#: The intervals of the histogram.
INTERVALS = 40


@dataclass(frozen=True, slots=True)
class Sample:
    """Pieces of a tensor: `count` of `size_bytes` each, `stride_bytes` from one to the next."""

    count: int
    size_bytes: int
    stride_bytes: int

    @property
    def total_bytes(self) -> int:
        """The bytes of all pieces."""
        return self.count * self.size_bytes


def sample_of(nbytes: int, unit_bytes: int) -> Sample:
    """Return the pieces to read of so many contiguous bytes, each of whole units; all of a small
    tensor."""
    if nbytes <= SAMPLE_BYTES:
        return Sample(1, nbytes, nbytes)
    size = max(unit_bytes, PIECE_BYTES // unit_bytes * unit_bytes)
    count = max(1, SAMPLE_BYTES // size)
    stride = (nbytes - size) // max(1, count - 1) // unit_bytes * unit_bytes
    return Sample(count, size, max(size, stride))


def tensor_view(tensor: TensorBase) -> str:
    """The tensor as HTML."""
    dtype = tensor.dtype.name
    head = f"Tensor {dtype} {tensor.shape} on {tensor.device}"
    kind = "" if tensor.is_contiguous else ", a view with gaps"
    about = facts([("size", f"{size_text(tensor.nbytes)}, {tensor.size:,} elements{kind}")])
    if tensor.freed:
        return card(head, about, warning("the tensor was freed"))
    if not tensor.size:
        return card(head, about, note("it has no elements"))
    if not tensor._shell.can_wait and tensor._shell.core.lost is None:
        return card(head, about, note("await tensor.get() reads its elements"))
    return card(head, about, *_elements(tensor))


def _elements(tensor: TensorBase) -> list[Markup]:
    """The corner and the statistics, or a line that says why there are none."""
    try:
        corner = _corner(tensor)
    except HeliographError as error:
        return [warning(error.message)]
    found = look(tensor._shell, _looking(tensor, corner), f"looking at {tensor._named}")
    if isinstance(found, Markup):
        return [found]
    elements, sample = found
    numbers = _numbers(sample, tensor.dtype).reshape(-1)
    shown = [] if elements is None else _corner_rows(tensor, _numbers(elements, tensor.dtype))
    return [*_statistics(numbers, tensor.size), *shown]


def _looking(tensor: TensorBase, corner: TensorBase | None) -> Procedure[tuple[Array | None, Array]]:
    """Read the corner and the sample, as raw elements."""
    elements = None
    if corner is not None:
        elements = np.empty(corner.type.storage_shape, corner.dtype.storage)
        whole = c.GetTensor(corner._live_handle, 0, elements.nbytes)
        yield from read(corner._shell.core, whole, byte_view(elements), corner.dtype.block_bytes)
        if not tensor.is_contiguous:
            return elements, elements
    unit = tensor.dtype.block_bytes
    pieces = sample_of(tensor.nbytes, unit)
    chunks = c.Chunks(pieces.size_bytes, pieces.count, pieces.stride_bytes)
    gaps = chunks if pieces.count > 1 and pieces.stride_bytes > pieces.size_bytes else None
    raw = np.empty(pieces.total_bytes, np.uint8)
    command = c.GetTensor(tensor._live_handle, 0, pieces.total_bytes, chunks=gaps)
    yield from read(tensor._shell.core, command, byte_view(raw), unit)
    return elements, raw


def _corner(tensor: TensorBase) -> TensorBase | None:
    """A view of the first rows and columns: of the last two dimensions, at the start of the others.

    None for rows of blocks, which cannot be cut, that are too long to read whole.
    """
    key: list[Any] = [0] * max(0, len(tensor.shape) - 2)
    if len(tensor.shape) > 1:
        key.append(slice(ROWS))
    if tensor.dtype.kind == "quantized":
        row_bytes = tensor.type.storage_shape[-1]
        return tensor[tuple(key)] if row_bytes * ROWS <= SAMPLE_BYTES else None
    if tensor.shape:
        key.append(slice(COLUMNS))
    return tensor[tuple(key)]


def _numbers(raw: Array, dtype: DType) -> Array:
    """Raw elements as numbers; rows of bytes of a flat sample too."""
    if dtype.kind == "quantized":
        return dequantize(raw, dtype)
    found = raw.reshape(-1).view(dtype.storage).reshape(-1) if raw.dtype == np.uint8 else raw
    return blocks.from_bits(found) if dtype.name == "bf16" else found


def _statistics(numbers: Array, size: int) -> list[Markup]:
    """Facts and a histogram of a sample."""
    all_of_it = numbers.size == size
    wide = numbers.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    of = "all elements" if all_of_it else f"{numbers.size:,} of {size:,} elements"
    pairs: list[tuple[str, object]] = []
    if finite.size:
        low, high, mean, spread = finite.min(), finite.max(), finite.mean(), finite.std()
        pairs = [
            ("least … largest", f"{number(float(low))} … {number(float(high))}"),
            ("mean ± deviation", f"{number(float(mean))} ± {number(float(spread))}"),
            ("zeros", f"{np.count_nonzero(finite == 0) / numbers.size:.1%}"),
        ]
    bad = numbers.size - finite.size
    nan = int(np.isnan(wide).sum())
    return [
        heading(f"statistics of {of}"),
        facts(pairs),
        *([warning(f"{nan:,} NaN, {bad - nan:,} infinite")] if bad else []),
        _histogram(finite),
    ]


def _histogram(finite: Array) -> Markup:
    """The distribution of numbers; none of equal ones, or where an interval is too small for f64."""
    if finite.size < 2 or not math.isfinite(float(finite.max() - finite.min())):
        return Markup("")
    low, high = float(finite.min()), float(finite.max())
    if not high - low > abs(high) * 1e-12:
        return Markup("")
    counts, _ = np.histogram(finite, bins=INTERVALS, range=(low, high))
    return histogram(counts.tolist(), f"distribution from {number(low)} to {number(high)}")


def _corner_rows(tensor: TensorBase, corner: Array) -> list[Markup]:
    """The corner as a table, with an ellipsis where there is more."""
    columns = tensor.shape[-1] if tensor.shape else 1
    rows = tensor.shape[-2] if len(tensor.shape) > 1 else 1
    grid = corner.reshape(-1, corner.shape[-1] if corner.ndim else 1)[:ROWS, :COLUMNS]
    more = ["…"] if columns > grid.shape[1] else []
    header = [*map(str, range(grid.shape[1])), *more]
    shown = [[*map(_element, row), *more] for row in grid.tolist()]
    place = "".join("0, " for _ in tensor.shape[:-2])
    left = [note(f"{rows - len(grid):,} more rows")] if rows > len(grid) else []
    title = f"elements at [{place}…]" if place else "first elements"
    return [heading(title), table(header, shown), *left]


def _element(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
