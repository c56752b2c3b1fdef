"""Builds programs from steps, as words. Plain Python, without numba.

Every method appends one step. Steps run in order, and each sees the results of the earlier ones. A
step over an empty space is left out. Shapes are in elements, strides and offsets in bytes; all
elements are float32. Errors are ValueErrors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, TypeAlias

import numpy as np

from heliograph_backends.cpu.kernels.program import words
from heliograph_backends.cpu.kernels.program.encoding import (
    SHARING_NS,
    Encoding,
    broadcast,
    encode_elementwise,
    encode_gemm,
    encode_rotary,
    encode_rows,
    encode_soft_max,
)
from heliograph_backends.cpu.kernels.program.encoding_direct import encode_direct
from heliograph_backends.cpu.kernels.program.encoding_experts import encode_experts
from heliograph_backends.cpu.kernels.program.encoding_images import (
    Taps,
    encode_fold,
    encode_pool_back,
    encode_resample,
    encode_unfold,
)
from heliograph_backends.cpu.kernels.program.encoding_rows import (
    encode_attention,
    encode_convert,
    encode_gather,
    encode_random,
    encode_scatter,
)
from heliograph_backends.cpu.kernels.program.encoding_searches import encode_running, encode_sort
from heliograph_backends.cpu.kernels.program.encoding_windows import encode_convolution, encode_windows
from heliograph_backends.cpu.kernels.program.program import (
    AnyOperand,
    Attention,
    Elementwise,
    Experts,
    Geometry,
    Operand,
    PackedOperand,
    Program,
    Rotation,
    StoredOperand,
)
from heliograph_backends.cpu.kernels.program.words import (
    COUNTER,
    PROGRAM_HEADER_WORDS,
    STEP_COUNT,
    TOGETHER,
    WORD_BYTES,
    Kind,
    Windowing,
)

#: The least time of a single-tile step that another worker takes over from the one with its
#: neighbour.
TOGETHER_NS = 20_000.0
#: The set of a step that runs by itself.
ALONE = -1


Array: TypeAlias = np.ndarray[Any, Any]
#: The slot and offset of an operand.
Place: TypeAlias = tuple[int, int]
#: The form of a step and the places of its operands, from which `append` makes it again.
Step: TypeAlias = tuple[Encoding, Sequence[Place]]


class Encodings:
    """The encoded forms of steps; the builders of a plan share them."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Encoding] = {}
        # Keys contain the `id` of instructions, so these must stay alive.
        self._kept: list[object] = []

    def find(self, key: Hashable, instructions: object, encode: Callable[[], Encoding]) -> Encoding:
        """Return the encoding of a key that contains the `id` of `instructions`."""
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = encode()
            self._kept.append(instructions)
        return found


class ProgramBuilder:
    """A builder of programs: methods append steps, `build` returns the program."""

    def __init__(self, encodings: Encodings | None = None, record: list[Step] | None = None) -> None:
        """`record` receives the steps, of which then no program is built."""
        self._encodings = encodings or Encodings()
        self._record = record
        #: The steps so far, in columns: their forms, their words, and the sets that they may run with.
        self._steps: list[Encoding] = []
        self._codes: list[bytes] = []
        self._sets: list[int] = []
        #: The slots and offsets to fill in, of all steps' operands in order.
        self._places: list[Place] = []
        self._set = ALONE

    def elementwise(self, shape: Sequence[int], body: Elementwise) -> None:
        """Run an elementwise program over `shape`, whose axes must merge to at most eight."""
        operands, instructions, narrow = body
        shape = tuple(shape)
        key = (id(instructions), shape, narrow, *[operand.strides for operand in operands])
        encoding = self._encodings.find(key, instructions, lambda: encode_elementwise(shape, body))
        self._append(encoding, operands)

    def gemm(
        self,
        rows: int,
        columns: int,
        depth: int,
        left: Operand,
        right: AnyOperand,
        product: Operand,
        batch: Sequence[int] = (),
        epilogue: Elementwise | None = None,
    ) -> None:
        """Multiply `batch` times: product[rows, columns] = left[rows, depth] @ right[depth,
        columns].

        `product` has contiguous columns and overlaps neither side. The epilogue's operands have the
        shape batch + (rows, columns); `product` itself may be one of them.
        """
        extra, instructions = epilogue[:2] if epilogue else ((), None)
        operands = (left, right, product, *extra)
        strides = [each[2] for each in operands]
        form = right[3:] if isinstance(right, StoredOperand) else type(right)
        key = (Kind.MATMUL, rows, columns, depth, form, tuple(batch), id(instructions), *strides)
        encoding = self._encodings.find(
            key,
            instructions,
            lambda: encode_gemm(rows, columns, depth, left, right, product, tuple(batch), epilogue),
        )
        self._append(encoding, operands)

    def convolution(
        self,
        sizes: Sequence[int],
        channels: tuple[int, int],
        geometry: Geometry,
        operands: tuple[Operand, Operand, Operand],
        epilogue: Elementwise | None = None,
    ) -> None:
        """Convolve data [*sizes, channels in, h, w] with kernels [*sizes, channels out, k] to a
        result [*sizes, channels out, oh, ow].

        `operands` are kernel, data and result. A kernel's k elements are contiguous: channels in,
        then the window. The result has contiguous planes and overlaps neither operand. The
        epilogue's operands have its shape, and planes that are rows.
        """
        extra, instructions = epilogue[:2] if epilogue else ((), None)
        every, sizes = (*operands, *extra), tuple(sizes)
        key = (Kind.MATMUL, sizes, channels, geometry, id(instructions), *[each.strides for each in every])
        encoding = self._encodings.find(
            key,
            instructions,
            lambda: encode_convolution(sizes, channels, geometry, operands, epilogue),
        )
        self._append(encoding, every)

    def direct(
        self,
        images: int,
        channels: tuple[int, int],
        geometry: Geometry,
        operands: tuple[PackedOperand, Operand, Operand],
        epilogue: Elementwise | None = None,
    ) -> None:
        """Convolve as `convolution` does, with a kernel [k, channels out] that is packed; sizes are
        images alone, and `direct_geometry` has the geometry."""
        extra, instructions = epilogue[:2] if epilogue else ((), None)
        kernel, data, result = operands
        strides = [each.strides for each in (data, result, *extra)]
        key = (Kind.CONVOLVE, images, channels, geometry, id(instructions), *strides)
        encoding = self._encodings.find(
            key,
            instructions,
            lambda: encode_direct(images, channels, geometry, operands, epilogue),
        )
        self._append(encoding, (kernel, data, result, *extra))

    def windows(
        self,
        kind: Windowing,
        sizes: Sequence[int],
        channels: int,
        geometry: Geometry,
        operands: tuple[Operand, Operand | None, Operand],
        epilogue: Elementwise | None = None,
    ) -> None:
        """Write a number for each window of data [*sizes, channels, h, w].

        `operands` are data, weights [*sizes, channels, taps] for sums of products, with contiguous
        taps, and a result with contiguous planes; otherwise like `convolution`.
        """
        extra, instructions = epilogue[:2] if epilogue else ((), None)
        every, sizes = [each for each in (*operands, *extra) if each is not None], tuple(sizes)
        strides = [each.strides for each in every]
        key = (Kind.WINDOWS, kind, sizes, channels, geometry, id(instructions), *strides)
        encoding = self._encodings.find(
            key,
            instructions,
            lambda: encode_windows(kind, sizes, channels, geometry, operands, epilogue),
        )
        self._append(encoding, every)

    def layer_norm(
        self,
        shape: Sequence[int],
        source: Operand,
        target: Operand,
        weight: Operand | None = None,
        bias: Operand | None = None,
        epsilon: float = 1e-5,
        form: int = 0,
    ) -> None:
        """Write (x - mean) / sqrt(variance + epsilon) * weight + bias over the last axis.

        `form`: `elements.HALF` or `BRAIN` for rows of f16 or bf16, as in the other norms.
        """
        self._rows(Kind.LAYER_NORM, shape, source, target, weight, bias, epsilon, form)

    def rms_norm(
        self,
        shape: Sequence[int],
        source: Operand,
        target: Operand,
        weight: Operand | None = None,
        epsilon: float = 1e-5,
        form: int = 0,
    ) -> None:
        """Write x / sqrt(mean(x**2) + epsilon) * weight over the last axis."""
        self._rows(Kind.RMS_NORM, shape, source, target, weight, None, epsilon, form)

    def soft_max(
        self,
        shape: Sequence[int],
        source: Operand,
        target: Operand,
        mask: Operand | None = None,
        scale: float = 1.0,
        *,
        narrow: int = 0,
        sinks: Operand | None = None,
        slopes: tuple[float, ...] = (),
        form: int = 0,
    ) -> None:
        """Write the soft maximum of x * scale + slope * mask over the last axis.

        `narrow` and `form`: `elements.HALF` or `BRAIN` for a mask, and for rows, of f16 or bf16. A
        sink, of stride 0 along the last axis, is one more score of each row. `slopes`, one for each
        index of axis -3; none: 1.
        """
        operands, shape = (source, mask, sinks, target), tuple(shape)
        strides = [None if operand is None else operand.strides for operand in operands]
        key = (Kind.SOFT_MAX, shape, struct.pack("d", scale), narrow, slopes, form, *strides)
        encoding = self._encodings.find(
            key, None, lambda: encode_soft_max(shape, operands, scale, narrow, slopes, form)
        )
        self._append(encoding, [operand for operand in operands if operand is not None])

    def l2_norm(
        self, shape: Sequence[int], source: Operand, target: Operand, epsilon: float = 1e-12, form: int = 0
    ) -> None:
        """Write x / max(sqrt(sum(x**2)), epsilon) over the last axis."""
        self._rows(Kind.L2_NORM, shape, source, target, None, None, epsilon, form)

    def sum_rows(self, shape: Sequence[int], source: Operand, target: Operand, form: int = 0) -> None:
        """Write the sum over the last axis; `target` has the shape shape[:-1]. `form` as in norms."""
        self._reduce(Kind.SUM, shape, source, target, form)

    def mean_rows(self, shape: Sequence[int], source: Operand, target: Operand, form: int = 0) -> None:
        """Write the mean over the last axis; `target` has the shape shape[:-1]."""
        self._reduce(Kind.MEAN, shape, source, target, form)

    def max_rows(self, shape: Sequence[int], source: Operand, target: Operand, form: int = 0) -> None:
        """Write the largest element over the last axis, or NaN if there is one; `target` has the
        shape shape[:-1].
        """
        if shape[-1] == 0 and 0 not in shape[:-1]:
            raise ValueError("the maximum of an empty row has no value")
        self._reduce(Kind.MAX, shape, source, target, form)

    def sort(
        self,
        shape: Sequence[int],
        source: Operand,
        target: Operand,
        form: int,
        kept: int,
        *,
        falling: bool,
    ) -> None:
        """Write the places (int32) of the first `kept` elements of each row in its stable order, or
        with 0 that of the first one alone, as a target of the shape shape[:-1].

        NaN is larger than any number. `falling`: the largest element is the first. `form`: that of
        the words of a sort, see `words`.
        """
        if kept == 0:
            target = target._replace(strides=(*target.strides, 0))
        key = (Kind.SORT, shape := tuple(shape), form, kept, falling, source.strides, target.strides)
        encoding = self._encodings.find(
            key, None, lambda: encode_sort(shape, source, target, form, kept, falling=falling)
        )
        self._append(encoding, (source, target))

    def running(
        self, shape: Sequence[int], source: Operand, target: Operand, form: int, *, product: bool
    ) -> None:
        """Write the sum, or the product, of each row up to each element. `form`: see `words`."""
        key = (Kind.RUNNING, shape := tuple(shape), form, product, source.strides, target.strides)
        encoding = self._encodings.find(
            key, None, lambda: encode_running(shape, source, target, form, product=product)
        )
        self._append(encoding, (source, target))

    def resample(
        self,
        outer: Sequence[int],
        source: Operand,
        target: Operand,
        down: Taps,
        across: Taps,
        *,
        copied: bool,
    ) -> None:
        """Write images [*outer, height, width] as weighted sums of the source's elements at the
        taps of each line and column, or with `copied` the elements at the first ones."""
        tables = [each.tobytes() for side in (down, across) for each in side]
        key = (Kind.RESAMPLE, *tables, copied, outer := tuple(outer), source.strides, target.strides)
        encoding = self._encodings.find(
            key, None, lambda: encode_resample(outer, source, target, down, across, copied=copied)
        )
        self._append(encoding, (source, target))

    def unfold(
        self,
        sizes: tuple[int, int],
        geometry: Geometry,
        data: Operand,
        rows: Operand,
        size: int,
        rounded: int = 0,
    ) -> None:
        """Write the windows of data [images, channels, h, w] as rows [images, windows, channels *
        taps]; `sizes` are images and channels.

        Elements have `size` bytes. `rounded`: `elements.HALF` or `BRAIN` for rows of f16 or bf16.
        """
        key = ("unfold", sizes, geometry, size, rounded, data.strides, rows.strides)
        encoding = self._encodings.find(
            key, None, lambda: encode_unfold(*sizes, geometry, data, rows, size, rounded)
        )
        self._append(encoding, (data, rows))

    def fold(self, sizes: tuple[int, int], geometry: Geometry, rows: Operand, data: Operand) -> None:
        """Write the sums of the elements of rows at the places of the data that `unfold` reads."""
        key = ("fold", sizes, geometry, rows.strides, data.strides)
        encoding = self._encodings.find(key, None, lambda: encode_fold(*sizes, geometry, rows, data))
        self._append(encoding, (rows, data))

    def pool_back(
        self,
        planes: Sequence[int],
        geometry: Geometry,
        operands: tuple[Operand, Operand, Operand],
        *,
        average: bool,
    ) -> None:
        """Write the gradient of a pool over images [*planes, h, w]; `operands` are the gradients of
        windows, the images, and the result."""
        gradients, images, result = operands
        strides = [each.strides for each in operands]
        key = ("pool_back", planes := tuple(planes), geometry, average, *strides)
        encoding = self._encodings.find(
            key,
            None,
            lambda: encode_pool_back(planes, geometry, gradients, images, result, average=average),
        )
        self._append(encoding, (gradients, result, images))

    def rotary(
        self,
        shape: Sequence[int],
        source: Operand,
        target: Operand,
        positions: Operand,
        rotation: Rotation,
        factors: Operand | None = None,
    ) -> None:
        """Rotate the pairs of all heads of each row by the row's positions; a row is its heads side
        by side.

        `positions` are int32. The operand names the first position of each row (stride 0 along it);
        the rotation has the distances of the others. Angles are divided by `factors`, one for each
        pair.
        """
        operands, shape = (source, positions, factors, target), tuple(shape)
        strides = [None if operand is None else operand.strides for operand in operands]
        numbers = struct.pack(
            f"{2 * len(rotation.angles) + 1}d", *rotation.angles, *rotation.scales, rotation.size
        )
        key = (Kind.ROTARY, shape, numbers, rotation[:4], rotation.positions, *strides)
        encoding = self._encodings.find(key, None, lambda: encode_rotary(shape, operands, rotation))
        self._append(encoding, [operand for operand in operands if operand is not None])

    def convert(self, shape: Sequence[int], source: Operand, target: Operand, conversion: int) -> None:
        """Copy all elements with a conversion of `elements`; the strides of rows of blocks are a
        block's."""
        shape = tuple(shape)
        key = (Kind.CONVERT, shape, conversion, source.strides, target.strides)
        encoding = self._encodings.find(key, None, lambda: encode_convert(shape, source, target, conversion))
        self._append(encoding, (source, target))

    def random(
        self, count: int, seed: Operand, counter: Operand, target: Operand, *, as_floats: bool
    ) -> None:
        """Write random bits, or float32 below 1, that a seed and a counter (int64) name to a
        contiguous target."""
        key = ("random", count, as_floats)
        encoding = self._encodings.find(key, None, lambda: encode_random(count, as_floats=as_floats))
        self._append(encoding, (seed, target, counter))

    def gather(
        self,
        shape: Sequence[int],
        rows: int,
        source: Operand,
        indices: Operand,
        target: Operand,
        conversion: int,
        index_bytes: int,
    ) -> None:
        """Write rows of the source, selected by indices below `rows`, to the target, which has this
        shape.

        `indices`, int32 or int64, have the shape shape[:-1]. An index out of range ends the run.
        """
        self._move(Kind.GATHER, shape, rows, (source, indices, target), conversion, index_bytes)

    def scatter(
        self,
        shape: Sequence[int],
        rows: int,
        source: Operand,
        indices: Operand,
        target: Operand,
        conversion: int,
        index_bytes: int,
    ) -> None:
        """Write rows of this shape to the target's rows, selected by indices below `rows`, in
        order; otherwise like `gather`.
        """
        self._move(Kind.SCATTER, shape, rows, (source, indices, target), conversion, index_bytes)

    def attention(
        self, outer: Sequence[int], rows: int, form: Attention, operands: Sequence[Operand | None]
    ) -> None:
        """Write attention of queries [outer, rows, key width] to the target [outer, rows, value
        width].

        `operands` are queries, keys and values [outer, keys, width], the target, and a mask [outer,
        rows, keys], sinks [outer, rows] and tables of pages (int32 [outer, pages]) or None. Strides
        cover two axes after the outer ones; those of keys and values are of their stored elements.
        With tables, keys and values are a page's, and a number out of range ends the run.
        """
        outer = tuple(outer)
        strides = [None if operand is None else operand.strides for operand in operands]
        key = (Kind.ATTENTION, outer, rows, form, *strides)
        encoding = self._encodings.find(key, None, lambda: encode_attention(outer, rows, form, operands))
        self._append(encoding, [operand for operand in operands if operand is not None])

    def experts(self, form: Experts, operands: tuple[Operand, Operand, Operand, Operand]) -> None:
        """Write for each token and each of its ids the token's row times the transposed matrix of
        the expert.

        `operands` are the experts, whose strides cover experts and rows, rows [tokens, own, depth],
        ids [tokens, used], int32 or int64, and the result [tokens, used, columns], which has
        contiguous rows. An id out of range ends the run.
        """
        key = (Kind.EXPERTS, form, *[operand.strides for operand in operands])
        encoding = self._encodings.find(key, None, lambda: encode_experts(form, operands))
        self._append(encoding, operands)

    @property
    def steps(self) -> int:
        """The number of steps so far, without empty ones."""
        return len(self._steps)

    @contextmanager
    def member_of(self, number: int) -> Iterator[None]:
        """Put the step appended in the block into a set that runs at the same time.

        Adjacent steps of the same number form a set; they must be independent. Several steps in one
        block run one after the other instead.
        """
        first = len(self._steps)
        self._set = number
        yield
        self._set = ALONE
        if (appended := len(self._steps) - first) > 1:
            self._sets[first:] = [ALONE] * appended

    def build(self) -> Program:
        """Return the program of the steps so far."""
        steps, header = self._steps, bytes(WORD_BYTES * PROGRAM_HEADER_WORDS)
        code = np.frombuffer(bytearray().join((header, *self._codes)), np.int64)
        code[STEP_COUNT] = len(steps)
        sizes = np.array([len(each) for each in self._codes], np.intp) // WORD_BYTES
        starts = PROGRAM_HEADER_WORDS + np.cumsum(sizes) - sizes
        operands = np.array([len(step.operands) for step in steps], np.intp)
        words_of = np.fromiter(chain.from_iterable([step.operands for step in steps]), np.intp)
        places = np.repeat(starts, operands) + words_of
        filled = np.fromiter(chain.from_iterable(self._places), np.int64).reshape(-1, 2)
        if filled.min(initial=0) < 0:
            raise ValueError("slots and offsets are not negative")
        code[places], code[places + 1] = filled.T
        nanoseconds = np.array([step.nanoseconds for step in steps])
        shared, together = _shared(steps, nanoseconds, np.array(self._sets, np.int64))
        code[starts[shared] + COUNTER] = np.arange(np.count_nonzero(shared))
        code[starts + TOGETHER] = together
        return Program(
            code=code,
            slots=int(filled[:, 0].max(initial=-1)) + 1,
            steps=len(steps),
            shared_steps=int(np.count_nonzero(shared)),
            needs=reduce(or_, {step.needs for step in steps}, words.ALWAYS),
            scratch_bytes=words.PACK_AT + max([step.pack_bytes for step in steps], default=0),
            shared_cost_ns=float(nanoseconds[shared].sum()),
            long_cost_ns=float(nanoseconds[nanoseconds > SHARING_NS].sum()),
        )

    def _move(
        self,
        kind: Kind,
        shape: Sequence[int],
        rows: int,
        operands: tuple[Operand, Operand, Operand],
        conversion: int,
        index_bytes: int,
    ) -> None:
        shape, (source, indices, target) = tuple(shape), operands
        encode = encode_gather if kind is Kind.GATHER else encode_scatter
        key = (kind, shape, rows, conversion, index_bytes, *[operand.strides for operand in operands])
        encoding = self._encodings.find(
            key,
            None,
            lambda: encode(shape, rows, source, indices, target, conversion, index_bytes),
        )
        self._append(encoding, (source, target, indices))

    def _reduce(self, kind: Kind, shape: Sequence[int], source: Operand, target: Operand, form: int) -> None:
        steps = (*broadcast(target, len(shape) - 1), 2 if form else 4)
        self._rows(kind, shape, source, target._replace(strides=steps), None, None, 0.0, form)

    def _rows(
        self,
        kind: Kind,
        shape: Sequence[int],
        source: Operand,
        target: Operand,
        weight: Operand | None,
        bias: Operand | None,
        parameter: float,
        form: int,
    ) -> None:
        operands, shape = (source, weight, bias, target), tuple(shape)
        strides = [None if operand is None else operand.strides for operand in operands]
        key = (kind, shape, struct.pack("d", parameter), form, *strides)
        encoding = self._encodings.find(
            key, None, lambda: encode_rows(kind, shape, operands, parameter, form=form)
        )
        self._append(encoding, [operand for operand in operands if operand is not None])

    def _append(self, encoding: Encoding, operands: Sequence[AnyOperand]) -> None:
        self.append(encoding, [(operand.slot, operand.offset) for operand in operands])

    def append(self, encoding: Encoding, places: Sequence[Place], member: int = ALONE) -> None:
        """Add a step: the words of its form, and the slots and offsets to fill in. `member`: the
        set of steps that it may run with, unless `member_of` names one."""
        if not encoding.code:
            return
        if self._record is not None:
            self._record.append((encoding, places))
            return
        if len(places) != len(encoding.operands):
            raise ValueError(f"{len(places)} places of {len(encoding.operands)} operands")
        code = encoding.code
        if encoding.through_caches and len(set(places)) < len(places):
            # Two operands start at the same place, as in a step that runs in place.
            code = encoding.through_caches
        self._steps.append(encoding)
        self._codes.append(code)
        self._sets.append(member if self._set == ALONE else self._set)
        self._places += places


def _shared(steps: Sequence[Encoding], nanoseconds: Array, sets: Array) -> tuple[Array, Array]:
    """Return for each step whether workers share it, and its word TOGETHER.

    In sets of several also single-tile steps are shared, so that workers take one each.
    """
    begins = np.ones(len(steps), bool)
    begins[1:] = (sets[1:] != sets[:-1]) | (sets[1:] == ALONE)
    set_of = np.cumsum(begins) - 1
    is_several = np.bincount(set_of)[set_of] > 1
    shared = np.array([step.shared for step in steps], bool) | (is_several & (nanoseconds > TOGETHER_NS))
    # The shared steps up to the end of each set.
    opened = np.cumsum(np.bincount(set_of, shared))[set_of].astype(np.int64)
    return shared, opened << 1 | ~begins
