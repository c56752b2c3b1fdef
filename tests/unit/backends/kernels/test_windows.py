"""The CPU kernels, convolutions and pools."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from kernel_runs import Array, multiply, normal, over, run, same_bits

from heliograph_backends.cpu.kernels import (
    Elementwise,
    Geometry,
    Input,
    Instruction,
    Operand,
    ProgramBuilder,
    Register,
    Windowing,
    WorkerPool,
)
from heliograph_backends.cpu.kernels import Operation as Op
from heliograph_backends.cpu.kernels.program import encoding_windows
from heliograph_backends.cpu.kernels.program.words import CHAINED, TILES
from heliograph_backends.cpu.lowering.windows import MOST_LINE_ELEMENTS

ONE, NONE = (1, 1), (0, 0)


class Form(NamedTuple):
    """Sizes of an image and a window, and how it moves."""

    image: tuple[int, int]
    window: tuple[int, int] = (3, 3)
    step: tuple[int, int] = ONE
    padding: tuple[int, int] = NONE
    spread: tuple[int, int] = ONE

    @property
    def geometry(self) -> Geometry:
        result = tuple(
            (size + 2 * pad - spread * (width - 1) - 1) // step + 1
            for size, width, step, pad, spread in zip(*self, strict=True)
        )
        return Geometry(self.image, self.window, self.step, self.spread, self.padding, result)  # type: ignore[arg-type]


#: Lines of a result that are longer and shorter than a vector, and than those of the image.
FORMS = (
    Form((1, 1), (1, 1)),
    Form((6, 9), (1, 1)),
    Form((9, 13), (1, 1), (2, 2)),
    Form((14, 14), padding=ONE),
    Form((7, 7), padding=ONE),
    Form((5, 40), padding=ONE),
    Form((9, 37)),
    Form((9, 100), padding=ONE),
    Form((2, 33), padding=(4, 5)),
    Form((14, 21), (5, 5), ONE, (2, 2)),
    Form((19, 23), (3, 3), (2, 2), ONE),
    Form((8, 70), (3, 5), (1, 2), (2, 3)),
    Form((16, 16), (4, 4), (4, 4)),
    Form((12, 11), (3, 2), (1, 1), (2, 1), (2, 3)),
    Form((10, 10), (7, 7), (2, 2), (3, 3)),
    Form((3, 3), (5, 5), ONE, (2, 2)),
    Form((1, 50), (1, 3), (1, 1), (0, 1)),
    Form((50, 1), (3, 1), (2, 1), (1, 0)),
    Form((4, 4), (4, 4)),
)


def windows_of(x: Array, form: Form, fill: float = 0.0) -> Array:
    """Return the windows of x [.., h, w] as [.., taps, places]."""
    geometry = form.geometry
    wide = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(pad, pad) for pad in form.padding], constant_values=fill)
    taps = []
    for place in itertools.product(*map(range, form.window)):
        key = tuple(
            slice(at * spread, at * spread + (count - 1) * step + 1, step)
            for at, spread, count, step in zip(place, form.spread, geometry.result, form.step, strict=True)
        )
        taps.append(wide[(..., *key)].reshape(*x.shape[:-2], -1))
    return np.stack(taps, axis=-2)


def convolve(
    kernel: Array, x: Array, form: Form, epilogue: Any = None, more: Any = (), pool: WorkerPool | None = None
) -> Array:
    """Convolve x [n, groups, c, h, w] with a kernel [groups, oc, c, kh, kw] by one step."""
    geometry, (groups, outer, inner) = form.geometry, kernel.shape[:3]
    y = np.full((len(x), groups, outer, *geometry.result), 7, np.float32)
    left = Operand(0, 0, (0, *kernel.strides[:2], 4))
    builder = ProgramBuilder()
    operands = (left, over(1, x), over(2, y))
    body = epilogue(over(2, y)) if epilogue else None
    builder.convolution(y.shape[:2], (inner, outer), geometry, operands, body)
    run(builder, [kernel, x, y, *more], pool)
    return y


def slide(
    kind: Windowing,
    x: Array,
    form: Form,
    weights: Array | None = None,
    epilogue: Any = None,
    more: Any = (),
    pool: WorkerPool | None = None,
) -> Array:
    """Return a number for each window of x [n, c, h, w] by one step; weights [c, taps]."""
    geometry = form.geometry
    y = np.full((*x.shape[:2], *geometry.result), 7, np.float32)
    builder = ProgramBuilder()
    taps = None if weights is None else Operand(2, 0, (0, *weights.strides)[-2:])
    body = epilogue(over(1, y)) if epilogue else None
    builder.windows(kind, x.shape[:1], x.shape[1], geometry, (over(0, x), taps, over(1, y)), body)
    run(builder, [x, y, x if weights is None else weights, *more], pool)
    return y


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("channels", [(1, 1, 1), (5, 13, 1), (4, 30, 3)], ids=str)
def test_a_convolution_has_the_bits_of_a_product_with_its_windows(
    form: Form, channels: tuple[int, int, int], random: np.random.Generator
) -> None:
    inner, outer, groups = channels
    x = normal(random, 2, groups, inner, *form.image)
    kernel = normal(random, groups, outer, inner, *form.window)
    seen = windows_of(x, form)
    flat = np.ascontiguousarray(seen.reshape(2, groups, -1, seen.shape[-1]))
    matrix = np.ascontiguousarray(
        np.broadcast_to(kernel.reshape(groups, outer, -1), (2, groups, outer, flat.shape[2]))
    )
    expected = multiply(matrix, flat)
    assert same_bits(convolve(kernel, x, form).reshape(expected.shape), expected)


@pytest.mark.parametrize(
    "form", [Form((6, 9), (1, 1)), Form((5, 5), padding=ONE), Form((9, 9), (5, 5))], ids=str
)
def test_a_convolution_is_one_chain_however_deep_it_is(form: Form, random: np.random.Generator) -> None:
    """Channels pass in slices, which begin with a channel."""
    x, kernel = normal(random, 1, 1, 1100, *form.image), normal(random, 1, 3, 1100, *form.window)
    seen = windows_of(x, form)
    flat = np.ascontiguousarray(seen.reshape(1, 1, -1, seen.shape[-1]))
    expected = multiply(kernel.reshape(1, 1, 3, -1), flat)
    assert same_bits(convolve(kernel, x, form).reshape(expected.shape), expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 40])
def test_windows_over_a_channel_have_the_bits_of_a_product(
    form: Form, channels: int, random: np.random.Generator
) -> None:
    x, weights = normal(random, 2, channels, *form.image), normal(random, channels, form.geometry.taps)
    left = np.broadcast_to(weights[:, None], (2, channels, 1, weights.shape[1]))
    expected = multiply(np.ascontiguousarray(left), windows_of(x, form))
    found = slide(Windowing.PRODUCT, x, form, weights)
    assert same_bits(found.reshape(expected.shape), expected)


@pytest.mark.parametrize("size", [(6, 20), (14, 14), (40, 70)], ids=str)
def test_padding_is_zeros_also_beside_weights_that_are_not_finite(
    size: tuple[int, int], random: np.random.Generator
) -> None:
    x, weights = normal(random, 1, 17, *size), normal(random, 17, 9)
    weights[::2, 0], weights[1::3, 4], weights[5, 8] = np.inf, np.nan, -np.inf
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    expected = slide(Windowing.PRODUCT, padded, Form(padded.shape[2:]), weights)
    found = slide(Windowing.PRODUCT, x, Form(size, padding=ONE), weights)
    assert np.isnan(expected).any() and np.array_equal(found, expected, equal_nan=True)


def test_planes_that_do_not_fit_in_the_cache_are_computed_by_lines(
    random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for form in (Form((40, 20), padding=ONE), Form((41, 90), (5, 3), (2, 2), (2, 1))):
        x, weights = normal(random, 1, 2, *form.image), normal(random, 2, form.geometry.taps)
        whole = slide(Windowing.PRODUCT, x, form, weights)
        for elements in (1, 500, 1000):
            monkeypatch.setattr(encoding_windows, "STAGED_ELEMENTS", elements)
            assert same_bits(slide(Windowing.PRODUCT, x, form, weights), whole)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_pools_are_maxima_and_sums_in_order(form: Form, random: np.random.Generator) -> None:
    x = normal(random, 2, 5, *form.image)
    least = float(np.finfo(np.float32).min)
    found = slide(Windowing.LARGEST, x, form)
    assert same_bits(found.reshape(2, 5, -1), windows_of(x, form, least).max(-2))
    total = np.zeros(found.reshape(2, 5, -1).shape, np.float32)
    seen = windows_of(x, form)
    for tap in range(seen.shape[-2]):
        total += seen[..., tap, :]
    found = slide(Windowing.MEAN, x, form)
    assert same_bits(found.reshape(2, 5, -1), total / np.float32(form.geometry.taps))


def test_a_largest_element_is_nan_if_one_is_and_infinite_if_all_are() -> None:
    x = np.full((1, 1, 4, 4), -np.inf, np.float32)
    x[0, 0, 3, 3] = np.nan
    found = slide(Windowing.LARGEST, x, Form((4, 4), (2, 2), (2, 2)))
    assert found[0, 0, :1].tolist() == [[-np.inf, -np.inf]] and np.isnan(found[0, 0, 1, 1])


def layouts(x: Array) -> Iterator[Array]:
    """Return the same planes with other strides."""
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), np.float32)
    wide[..., ::2] = x
    yield wide[..., ::2]
    cut = np.zeros((*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 3), np.float32)
    cut[..., 1:-1, 2:-1] = x
    yield cut[..., 1:-1, 2:-1]
    yield np.ascontiguousarray(np.moveaxis(x, -3, -1)).swapaxes(-1, -3).swapaxes(-1, -2)
    yield np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_views_of_images_have_the_bits_of_copies(form: Form, random: np.random.Generator) -> None:
    x, weights = normal(random, 1, 4, *form.image), normal(random, 4, form.geometry.taps)
    kernel = normal(random, 1, 5, 4, *form.window)
    expected = [
        convolve(kernel, x[:, None], form),
        slide(Windowing.PRODUCT, x, form, weights),
        slide(Windowing.LARGEST, x, form),
    ]
    for view in layouts(x):
        assert view.shape == x.shape and np.array_equal(view, x)
        assert same_bits(convolve(kernel, view[:, None], form), expected[0])
        assert same_bits(slide(Windowing.PRODUCT, view, form, weights), expected[1])
        assert same_bits(slide(Windowing.LARGEST, view, form), expected[2])


BINARY = {Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MAXIMUM, Op.MINIMUM}
IMMEDIATES = {Op.CLAMP: (-0.5, 0.75), Op.SCALE_BIAS: (1.5, 0.25), Op.LEAKY_RELU: (0.1,)}


def bodies() -> Iterator[tuple[str, tuple[Instruction, ...]]]:
    """Each instruction of chains on both sides of a value, and bodies that are no chains; of
    result, a number for each channel, and elements."""
    first, last = Register(0), Register(1)
    for op in sorted(CHAINED):
        more = IMMEDIATES.get(op, ())
        if op in BINARY:
            for name, pair in (("first", (first, Input(2))), ("second", (Input(2), first))):
                yield (
                    f"{op.name.lower()}-{name}",
                    (Instruction(Op.ADD, first, (Input(0), Input(1))), Instruction(op, Input(0), pair)),
                )
        else:
            yield (
                op.name.lower(),
                (
                    Instruction(Op.MUL, first, (Input(1), Input(0))),
                    Instruction(op, last, (first,), more),
                    Instruction(Op.ADD, Input(0), (Input(2), last)),
                ),
            )
    yield (
        "constants",
        (
            Instruction(Op.MAXIMUM, first, (Input(0), -0.5)),
            Instruction(Op.MINIMUM, first, (0.75, first)),
            Instruction(Op.ADD, first, (first, Input(1))),
            Instruction(Op.SUB, Input(0), (first, Input(2))),
        ),
    )
    biased = Instruction(Op.ADD, first, (Input(0), Input(1)))
    added = Instruction(Op.ADD, last, (first, Input(2)))
    for name, ends in (
        ("relu", [(Op.RELU, ())]),
        ("clamp", [(Op.CLAMP, (-0.5, 0.75))]),
        ("hardswish", [(Op.HARDSWISH, ())]),
        ("silu", [(Op.SILU, ())]),
        ("bounds", [(Op.MAXIMUM, -0.5), (Op.MINIMUM, 0.75)]),
        ("a bound", [(Op.MAXIMUM, -0.5)]),
    ):
        for start in ((biased,), (biased, added)):
            chain = list(start)
            for op, more in ends:
                sources = (chain[-1].result, *([more] if isinstance(more, float) else []))
                immediates = more if isinstance(more, tuple) else ()
                chain.append(Instruction(op, first, sources, immediates))
            chain[-1] = chain[-1]._replace(result=Input(0))
            yield f"{len(start)} sums and {name}", tuple(chain)
    yield "a sum", (biased._replace(result=Input(0)),)
    yield "sums", (biased, added._replace(result=Input(0)))
    yield (
        "a value read twice",
        (
            Instruction(Op.ADD, first, (Input(0), Input(1))),
            Instruction(Op.SIGMOID, last, (first,)),
            Instruction(Op.MUL, first, (first, last)),
            Instruction(Op.ADD, Input(0), (first, Input(2))),
        ),
    )


BODIES = dict(bodies())


def check_epilogue(
    compute: Any, channels: tuple[int, ...], instructions: tuple[Instruction, ...], more: list[Array]
) -> None:
    """Compare an epilogue with a step; `compute` takes a body by the result, and more arrays."""
    across = (0, *more[0].strides, 0, 0)[-len(channels) - 3 :]

    sources = [source for each in instructions for source in each.sources]

    def body(y: Operand, first: int = 3) -> Elementwise:
        operands = (y, Operand(first, 0, across), Operand(first + 1, 0, more[1].strides))
        return Elementwise(operands if Input(2) in sources else operands[:2], instructions)

    found, expected = compute(body, more), compute(None, ())
    builder = ProgramBuilder()
    builder.elementwise(expected.shape, body(over(0, expected), 1))
    run(builder, [expected, *more])
    assert same_bits(found, expected)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("form", [Form((5, 7), padding=ONE), Form((11, 19)), Form((20, 33), (1, 1))], ids=str)
def test_an_epilogue_of_windows_has_the_bits_of_a_separate_step(
    name: str, form: Form, random: np.random.Generator
) -> None:
    x, kernel = normal(random, 2, 2, 3, *form.image), normal(random, 2, 14, 3, *form.window)
    # Some channels are lanes of vectors, and some are not.
    planes, weights = normal(random, 2, 35, *form.image), normal(random, 35, form.geometry.taps)

    def convolved(epilogue: Any, more: Any) -> Array:
        return convolve(kernel, x, form, epilogue, more)

    def slid(epilogue: Any, more: Any) -> Array:
        return slide(Windowing.PRODUCT, planes, form, weights, epilogue, more)

    for compute, channels in ((convolved, (2, 14)), (slid, (35,))):
        more = [normal(random, *channels), normal(random, 2, *channels, *form.geometry.result)]
        check_epilogue(compute, channels, BODIES[name], more)


def test_bits_do_not_depend_on_the_number_of_threads(random: np.random.Generator) -> None:
    form = Form((40, 61), padding=ONE)
    x, kernel = normal(random, 2, 1, 24, *form.image), normal(random, 1, 50, 24, *form.window)
    weights = normal(random, 24, form.geometry.taps)
    alone = [convolve(kernel, x, form), slide(Windowing.PRODUCT, x[:, 0], form, weights)]
    for workers in (2, 3, 4):
        pool = WorkerPool(workers)
        try:
            for _ in range(3):
                assert same_bits(convolve(kernel, x, form, pool=pool), alone[0])
                assert same_bits(slide(Windowing.PRODUCT, x[:, 0], form, weights, pool=pool), alone[1])
        finally:
            pool.close()


def test_windows_spread_over_large_planes_have_a_tile_for_each() -> None:
    """A run pauses and ends between tiles, so few results that read much are not together."""
    geometry = Form((1001, 1001), (2, 2), spread=(1000, 1000)).geometry
    operands = Operand(0, 0, (0, 4 * 1001, 4)), Operand(1, 0, (16, 4)), Operand(2, 0, (4, 4, 4))
    made = encoding_windows.encode_windows(Windowing.PRODUCT, (), 4096, geometry, operands, None)
    assert np.frombuffer(made.code, np.int64)[TILES] == 4096


@pytest.mark.parametrize(
    "form",
    [
        Form((1024, 1024), (2, 2), (1024, 1024), spread=(1023, 1023)),
        Form((1, 2**20), (1, 2), (1, 2**20), spread=(1, 2**20 - 1)),
        Form((1, 2**20 - 16), (1, 2), spread=(1, 2**20 - 17)),
        Form((3, 2**18)),
    ],
    ids=str,
)
def test_windows_with_a_kernel_take_little_scratch(form: Form) -> None:
    """No quota counts the scratch of workers."""
    geometry = form.geometry
    width = geometry.result[1]
    operands = Operand(0, 0, (0, 0, 4)), Operand(1, 0, (0, 4)), Operand(2, 0, (0, 4 * width, 4))
    made = encoding_windows.encode_windows(Windowing.PRODUCT, (), 1, geometry, operands, None)
    assert geometry.line_elements > MOST_LINE_ELEMENTS or made.pack_bytes <= 2**24


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_nothing_around_a_result_is_written(form: Form, random: np.random.Generator) -> None:
    x, weights = normal(random, 1, 2, *form.image), normal(random, 2, form.geometry.taps)
    kernel = normal(random, 1, 2, 2, *form.window)
    height, width = form.geometry.result
    size = 2 * height * width
    for each in (weights, kernel):
        room = np.full(size + 128, np.nan, np.float32)
        target = Operand(0, 4 * 64, (4 * size, 4 * height * width, 4 * width, 4))
        builder = ProgramBuilder()
        if each is weights:
            taps = Operand(2, 0, (0, *weights.strides)[-2:])
            operands = (over(1, x), taps, target)
            builder.windows(Windowing.PRODUCT, (1,), 2, form.geometry, operands)
        else:
            left = Operand(2, 0, (0, kernel.strides[1], 4))
            builder.convolution((1,), (2, 2), form.geometry, (left, over(1, x), target))
        run(builder, [room, x, each])
        assert np.isnan(room[:64]).all() and np.isnan(room[64 + size :]).all()
        assert not np.isnan(room[64 : 64 + size]).any()


def test_windows_that_no_step_can_have_are_refused(random: np.random.Generator) -> None:
    x, kernel = normal(random, 1, 1, 2, 40, 40), normal(random, 1, 3, 2, 33, 33)
    with pytest.raises(ValueError, match="a window of 1089 elements"):
        convolve(kernel, x, Form((40, 40), (33, 33)))
    with pytest.raises(ValueError, match="a window of 1089 elements"):
        slide(Windowing.MEAN, x[:, 0], Form((40, 40), (33, 33)))
    form = Form((5, 5), (1, 1))
    y = np.zeros((1, 2, 5, 10), np.float32)[..., ::2]
    builder = ProgramBuilder()
    with pytest.raises(ValueError, match="contiguous planes"):
        builder.windows(Windowing.MEAN, (1,), 2, form.geometry, (over(0, x), None, over(1, y)))
    cut = np.zeros((1, 2, 5, 9), np.float32)[..., :5]
    with pytest.raises(ValueError, match="are not rows"):
        builder.windows(Windowing.MEAN, (1,), 2, form.geometry, (over(0, x), None, over(1, cut)))
