"""Windows at places that a run computes: reads, writes, bounds, gradients and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import heliograph as hg

Array = np.ndarray[Any, Any]


@pytest.fixture
def session() -> Iterator[hg.Session]:
    with hg.connect("local:") as made:
        yield made


def window(shape: tuple[int, ...], starts: list[int], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """The window as XLA places it: within the shape."""
    placed = [min(max(at, 0), room - size) for at, room, size in zip(starts, shape, sizes, strict=True)]
    return tuple(slice(at, at + size) for at, size in zip(placed, sizes, strict=True))


def random_case(random: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
    shape = tuple(int(one) for one in random.integers(1, 7, random.integers(1, 5)))
    sizes = tuple(int(random.integers(0 if size > 5 else 1, size + 1)) for size in shape)
    return shape, sizes, [int(one) for one in random.integers(-4, 10, len(shape))]


def starts_of(g: hg.Graph, random: np.random.Generator, starts: list[int]) -> tuple[Any, dict[str, Array]]:
    """Starts as one vector, or as numbers and values of several integer types, and the inputs."""
    if random.random() < 0.3:
        return g.input("starts", (len(starts),), "i32"), {"starts": np.array(starts, np.int32)}
    given: list[Any] = list(starts)
    inputs = {}
    for axis, start in enumerate(starts):
        if random.random() < 0.6:
            dtype = str(random.choice(["i8", "i32", "i64"] + (["u64", "u8"] if start >= 0 else [])))
            shape = () if random.random() < 0.5 else (1,)
            given[axis] = g.input(f"at{axis}", shape, dtype)
            inputs[f"at{axis}"] = np.full(shape, start, given[axis].dtype.numpy)
    return given, inputs


@pytest.mark.parametrize("seed", range(30))
def test_windows_are_those_of_numpy_at_clamped_places(session: hg.Session, seed: int) -> None:
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    shape, sizes, starts = random_case(random)
    x, update = random.standard_normal(shape), random.standard_normal(sizes)
    X, U = x.astype(np.float32), update.astype(np.float32)
    g = hg.Graph()
    given, inputs = starts_of(g, random, starts)
    value, part = g.input("x", shape, "f32"), g.input("u", sizes, "f32")
    g.output("read", hg.dynamic_slice(value, given, sizes))
    g.output("written", hg.dynamic_update_slice(value, part, given))
    found = session.compile(g).run({"x": X, "u": U, **inputs})
    where = window(shape, starts, sizes)
    expected = X.copy()
    expected[where] = U
    assert np.array_equal(found["read"], X[where]) and np.array_equal(found["written"], expected)


@pytest.mark.parametrize("dtype", ["bool", "i8", "u16", "i64", "f16", "bf16", "f64"])
def test_elements_of_every_kind_keep_their_bits(session: hg.Session, dtype: str) -> None:
    g = hg.Graph()
    raw = np.random.default_rng(1).integers(0, 2, (6, 4)).astype(np.float32)
    x = hg.astype(g.input("x", (6, 4), "f32"), dtype)
    at = g.input("at", (), "i32")
    read = hg.dynamic_slice(x, [at, 1], (2, 2))
    g.output("read", hg.astype(read, "f32"))
    g.output("same", hg.astype(hg.dynamic_update_slice(x, read, [at, 1]), "f32"))
    assert read.dtype.name == dtype
    found = session.compile(g).run(x=raw, at=np.int32(3))
    assert np.array_equal(found["read"], raw[3:5, 1:3]) and np.array_equal(found["same"], raw)


def test_blocks_are_read_as_numbers_and_written_as_blocks(session: hg.Session) -> None:
    g = hg.Graph()
    table = g.variable("table", (8, 2, 32), "q8_0")
    at = g.input("at", (), "i32")
    hg.assign(table, hg.dynamic_update_slice(table, g.input("u", (3, 2, 32), "f32"), [at, 0, 0]))
    g.output("read", hg.dynamic_slice(table, [at - 1, 0, 0], (5, 2, 32)))
    with pytest.raises(hg.InvalidGraphError, match="along its last dimension(.|\n)*elements are blocks"):
        hg.dynamic_slice(table, [0, 0, at], (8, 2, 16))
    found = session.compile(g).run(at=np.int32(4), u=np.full((3, 2, 32), 127.0, np.float32))["read"]
    assert found[1:4].tolist() == np.full((3, 2, 32), 127.0).tolist() and not found[[0, 4]].any()


LAYOUTS = [((64, 16), 0), ((4, 64, 16), 1), ((64, 4, 16), 0), ((2, 3, 64, 8), 2), ((256,), 0)]


@pytest.mark.parametrize(("shape", "axis"), LAYOUTS)
def test_a_window_of_a_variable_is_written_in_place(
    session: hg.Session, shape: tuple[int, ...], axis: int
) -> None:
    """A cache that grows along one dimension, in a loop, takes no memory beside the window."""
    sizes = tuple(4 if place == axis else size for place, size in enumerate(shape))
    g = hg.Graph()
    name = f"cache{axis}{len(shape)}"
    cache, at = g.variable(name, shape, "f32"), g.input("at", (), "i32")
    starts = [at if place == axis else 0 for place in range(len(shape))]
    part = hg.broadcast_to(hg.astype(at, "f32"), sizes) + 1.0
    now = hg.assign(cache, hg.dynamic_update_slice(cache, part, starts))
    g.output("window", hg.dynamic_slice(now, starts, sizes))
    g.output("next", at + 4)
    plan = session.compile(g)
    assert plan.compute_bytes < np.prod(shape) * 4
    found = plan.loop(at=np.int32(0), steps=10, carry={"next": "at"}).result(20)
    assert np.array_equal(found["window"], np.full(sizes, 37.0))
    expected = np.zeros(shape[axis])
    expected[:40] = np.repeat(np.arange(10) * 4 + 1, 4)
    lined = np.moveaxis(plan.checkpoint()[name], axis, -1).reshape(-1, shape[axis])
    assert all(np.array_equal(line, expected) for line in lined)


def test_reads_before_a_write_have_the_old_elements(session: hg.Session) -> None:
    g = hg.Graph()
    v, at = g.variable("old", (3, 8, 2), "f32"), g.input("at", (), "i32")
    before = hg.dynamic_slice(v, [0, at, 0], (3, 2, 2))
    whole = hg.sum(v)
    now = hg.assign(v, hg.dynamic_update_slice(v, before + 1.0, [0, at, 0]))
    g.output("before", before)
    g.output("sums", hg.stack([whole, hg.sum(now)]))
    plan = session.compile(g)
    for step in range(3):
        found = plan.run(at=np.int32(5))
        assert np.array_equal(found["before"], np.full((3, 2, 2), step))
        assert found["sums"].tolist() == [12.0 * step, 12.0 * (step + 1)]


def test_gradients_go_to_the_window(session: hg.Session) -> None:
    def loss(x: hg.Value, u: hg.Value, at: hg.Value) -> hg.Value:
        weights = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
        changed = hg.dynamic_update_slice(x, u, [0, at, 0])
        return hg.sum(changed * weights) + hg.sum(hg.dynamic_slice(x, [0, at, 1], (2, 1, 2)) * 100.0)

    g = hg.Graph()
    x, u = g.input("x", (2, 4, 3), "f32"), g.input("u", (2, 2, 3), "f32")
    at = g.input("at", (), "i32")
    for name, gradient in zip("xu", hg.grad(loss(x, u, at), [x, u]), strict=True):
        g.output(name, gradient)
    zeros = np.zeros((2, 4, 3), np.float32)
    found = session.compile(g).run({"x": zeros, "u": zeros[:, :2], "at": np.int32(9)})
    expected = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    assert np.array_equal(found["u"], expected[:, 2:])
    expected[:, 2:] = 0.0
    expected[:, 3, 1:] += 100.0
    assert np.array_equal(found["x"], expected)


def test_a_window_of_everything_is_the_tensor_itself() -> None:
    g = hg.Graph()
    x, u, at = g.input("x", (3, 2), "f32"), g.input("u", (3, 2), "f32"), g.input("at", (2,), "i32")
    assert hg.dynamic_slice(x, at, (3, 2)) is x
    assert hg.dynamic_update_slice(x, u, [0, 5]) is u


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda x, i: hg.dynamic_slice(x, [i, 0], (5, 2)), r"a window of \(5, 2\)"),
        (lambda x, i: hg.dynamic_slice(x, [i, 0], (2,)), "as many dimensions"),
        (lambda x, i: hg.dynamic_slice(x, [i], (2, 2)), "at 1 starts(.|\n)*one for each dimension"),
        (lambda x, i: hg.dynamic_slice(x, i, (2, 2)), "starts are one vector"),
        (lambda x, i: hg.dynamic_slice(x, [i, 1.5], (2, 2)), "starts are integers"),
        (lambda x, i: hg.dynamic_slice(x, [x[0, 0], 0], (2, 2)), "a start is one integer"),
        (lambda x, i: hg.dynamic_slice(x, [np.zeros(2, np.int32), 0], (2, 2)), "a start is one integer"),
        (lambda x, i: hg.dynamic_update_slice(x, x[:, :1][None], [i, 0, 0]), "as many dimensions"),
    ],
)
def test_windows_that_are_none_are_refused(build: Callable[[Any, Any], Any], words: str) -> None:
    g = hg.Graph()
    x, i = g.input("x", (4, 3), "f32"), g.input("i", (), "i32")
    with pytest.raises(hg.InvalidArgumentError, match=words):
        build(x, i)
