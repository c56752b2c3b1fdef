"""x[...] and hg.take against NumPy, over forms drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import heliograph as hg

Array = np.ndarray[Any, Any]
SEED = 20
FORMS = 150


def results(session: hg.Session, array: Array, forms: list[Callable[[Any], Any]]) -> list[Array]:
    """Return what each form gives for a value that holds the array."""
    g = hg.Graph()
    x = g.input("x", array.shape, array.dtype)
    for number, form in enumerate(forms):
        g.output(f"y{number}", form(x))
    found = session.compile(g).run(x=array)
    return [found[f"y{number}"] for number in range(len(forms))]


def drawn_slice(draw: random.Random, size: int) -> slice:
    bound = range(-size - 2, size + 3)
    step = draw.choice([None, -3, -2, -1, 1, 2, 3])
    return slice(draw.choice([None, *bound]), draw.choice([None, *bound]), step)


def drawn_key(draw: random.Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    parts: list[Any] = [
        draw.randrange(-size, size) if draw.random() < 0.3 else drawn_slice(draw, size) for size in shape
    ]
    if draw.random() < 0.3:
        parts[draw.randrange(len(parts)) :] = [Ellipsis]
    if draw.random() < 0.3:
        parts.insert(draw.randrange(len(parts) + 1), None)
    return tuple(parts)


def test_slices_with_any_step_give_what_numpy_gives(local: hg.Session) -> None:
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    array = np.arange(4 * 3 * 5, dtype=np.int32).reshape(4, 3, 5)
    keys = [drawn_key(draw, array.shape) for _ in range(FORMS)]
    found = results(local, array, [lambda x, key=key: x[key] for key in keys])
    for key, one in zip(keys, found, strict=True):
        assert np.array_equal(one, array[key]) and one.shape == array[key].shape, key


def test_a_reversed_value_keeps_its_data_type(local: hg.Session) -> None:
    for dtype in ("float16", "float64", "bool", "uint8", "int64"):
        array = np.arange(6).astype(dtype)
        (found,) = results(local, array, [lambda x: x[::-1]])
        assert found.dtype == array.dtype and np.array_equal(found, array[::-1]), dtype


def test_take_accepts_ints_and_lists_and_counts_from_the_end(local: hg.Session) -> None:
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    array = np.arange(4 * 5, dtype=np.float32).reshape(4, 5)
    chosen: list[tuple[Any, int]] = [([], 0), ([[0, -1], [2, 1]], 1), ((3, -4), 0), (-1, 1), (np.int8(-2), 0)]
    for _ in range(FORMS):
        axis = draw.randrange(2)
        size = array.shape[axis]
        chosen.append(([draw.randrange(-size, size) for _ in range(draw.randrange(4))], axis))
    found = results(local, array, [lambda x, one=one: hg.take(x, one[0], axis=one[1]) for one in chosen])
    for (indices, axis), one in zip(chosen, found, strict=True):
        expected = np.take(array, np.asarray(indices, np.int64), axis)
        assert np.array_equal(one, expected) and one.shape == expected.shape, (indices, axis)


@pytest.mark.parametrize("indices", [[0, 4], [-5], 4, np.array([7], np.uint8)])
def test_a_known_index_outside_is_an_error_of_the_line(indices: Any) -> None:
    x = hg.Graph().input("x", (4, 3), "f32")
    with pytest.raises(hg.OutOfRangeError, match="outside dimension 0") as caught:
        hg.take(x, indices, axis=0)
    assert "from -4 to 3" in caught.value.advice and "hg.take(x" in caught.value.origin.source


@pytest.mark.parametrize("indices", [[0.5], [[1], [2, 3]], ["a"], [True]])
def test_a_list_of_something_else_is_no_list_of_indices(indices: Any) -> None:
    x = hg.Graph().input("x", (4, 3), "f32")
    with pytest.raises(hg.InvalidGraphError, match="no list of indices"):
        hg.take(x, indices, axis=0)


def test_a_view_of_a_tensor_cannot_be_reversed_and_says_what_can() -> None:
    with hg.connect("local:") as session:
        tensor = session.put(np.arange(4, dtype=np.float32))
        with pytest.raises(hg.InvalidArgumentError, match="reverses dimension 0") as caught:
            tensor[::-1]
        assert "hg.flip" in caught.value.advice
        assert np.array_equal(tensor[2:1:-1].get(), [2.0])
