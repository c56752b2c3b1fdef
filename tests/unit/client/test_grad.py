"""`hg.grad` and `hg.value_and_grad`: against formulas by hand, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import heliograph as hg

Array = np.ndarray[Any, Any]
SEED = 7


@pytest.fixture
def random() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def gradients(session: hg.Session, loss: Callable[..., hg.Value], *arrays: Array) -> list[Array]:
    """The gradients of a loss of values with respect to all of them."""
    g = hg.Graph()
    values = [g.input(f"x{place}", one.shape, one.dtype) for place, one in enumerate(arrays)]
    for place, one in enumerate(hg.grad(loss(*values), values)):
        g.output(f"d{place}", one)
    found = session.compute(g, {f"x{place}": one for place, one in enumerate(arrays)})
    return [found[f"d{place}"] for place in range(len(arrays))]


def f64(random: np.random.Generator, *shape: int) -> Array:
    return random.standard_normal(shape)


def close(found: Array, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


# Formulas by hand


def test_a_network_of_two_layers_has_the_gradients_of_backpropagation(
    local: hg.Session, random: np.random.Generator
) -> None:
    x, w1, b1, w2 = f64(random, 6, 5), f64(random, 5, 4), f64(random, 4), f64(random, 4, 3)
    labels = np.eye(3)[random.integers(0, 3, 6)]

    def loss(x: hg.Value, w1: hg.Value, b1: hg.Value, w2: hg.Value) -> hg.Value:
        logits = hg.tanh(x @ w1 + b1) @ w2
        return -hg.mean(hg.sum(hg.log_softmax(logits) * labels, axis=-1))

    dx, dw1, db1, dw2 = gradients(local, loss, x, w1, b1, w2)
    hidden = np.tanh(x @ w1 + b1)
    powers = np.exp(hidden @ w2)
    slopes = (powers / powers.sum(-1, keepdims=True) - labels) / 6
    back = (slopes @ w2.T) * (1 - hidden**2)
    close(dw2, hidden.T @ slopes)
    close(db1, back.sum(0))
    close(dw1, x.T @ back)
    close(dx, back @ w1.T)


def test_a_product_of_many_matrices_with_one_sums_over_them(
    local: hg.Session, random: np.random.Generator
) -> None:
    x, w, c = f64(random, 2, 3, 4, 5), f64(random, 5, 6), f64(random, 2, 3, 4, 6)
    dx, dw = gradients(local, lambda x, w: hg.sum((x @ w) * c), x, w)
    close(dw, np.einsum("abij,abik->jk", x, c))
    close(dx, c @ w.T)
    x, w = f64(random, 2, 1, 4, 5), f64(random, 3, 5, 6)
    dx, dw = gradients(local, lambda x, w: hg.sum((x @ w) * c), x, w)
    close(dw, np.einsum("abij,abik->bjk", np.broadcast_to(x, (2, 3, 4, 5)), c))
    close(dx, (c @ w.swapaxes(-1, -2)).sum(1, keepdims=True))


def test_attention_has_the_gradients_of_its_formula(local: hg.Session, random: np.random.Generator) -> None:
    q, k, v, c = (f64(random, 4, 3) for _ in range(4))

    def loss(q: hg.Value, k: hg.Value, v: hg.Value) -> hg.Value:
        return hg.sum((hg.softmax(q @ k.T * 0.5) @ v) * c)

    dq, dk, dv = gradients(local, loss, q, k, v)
    powers = np.exp(q @ k.T * 0.5)
    weights = powers / powers.sum(-1, keepdims=True)
    slopes = c @ v.T
    scores = weights * (slopes - (slopes * weights).sum(-1, keepdims=True)) * 0.5
    close(dv, weights.T @ c)
    close(dq, scores @ k)
    close(dk, scores.T @ q)


def test_rows_that_are_read_twice_add_up(local: hg.Session, random: np.random.Generator) -> None:
    table, c = f64(random, 5, 2), f64(random, 4, 2)
    tokens = np.array([3, 1, 3, 3])
    (found,) = gradients(local, lambda table: hg.sum(hg.take(table, tokens, axis=0) * c), table)
    expected = np.zeros((5, 2))
    np.add.at(expected, tokens, c)
    close(found, expected)


def test_views_that_overlap_add_up(local: hg.Session, random: np.random.Generator) -> None:
    x = f64(random, 6)
    (found,) = gradients(local, lambda x: hg.sum(x[:4] * 2.0) + hg.sum(x[1::2]) + hg.sum(x[::-1] * x), x)
    close(found, np.array([2, 3, 2, 3, 0, 1]) + 2 * x[::-1])


def test_an_operand_that_stands_twice_gets_both_parts(local: hg.Session, random: np.random.Generator) -> None:
    x = f64(random, 4)
    (product,) = gradients(local, lambda x: hg.sum(x * x), x)
    close(product, 2 * x)
    (gated,) = gradients(local, lambda x: hg.sum(hg.ops.swiglu(x, x)), x)
    s = 1 / (1 + np.exp(-x))
    close(gated, x * s * (2 + x * (1 - s)))


def test_equal_largest_elements_share_the_gradient(local: hg.Session) -> None:
    x = np.array([[1.0, 3.0, 3.0], [5.0, 2.0, 5.0]])
    (found,) = gradients(local, lambda x: hg.sum(hg.max(x, axis=1)), x)
    close(found, [[0, 0.5, 0.5], [0.5, 0, 0.5]])


def test_products_with_zeros_have_gradients(local: hg.Session) -> None:
    x = np.array([[2.0, 0.0, 3.0], [0.0, 4.0, 0.0]])
    (found,) = gradients(local, lambda x: hg.sum(hg.prod(x, axis=1)), x)
    close(found, [[0, 6, 0], [0, 0, 0]])


def test_narrow_floats_get_gradients_of_their_own_type(local: hg.Session) -> None:
    g = hg.Graph()
    half, wide = g.input("half", (3,), "f16"), g.input("wide", (3,), "f32")
    first, second = hg.grad(hg.sum(half * wide), (half, wide))
    assert (first.dtype.name, second.dtype.name) == ("f16", "f32")
    g.output("first", first)
    found = local.compute(g, half=np.ones(3, np.float16), wide=np.full(3, 2, np.float32))
    assert found["first"].tolist() == [2, 2, 2]


def test_a_gradient_of_a_gradient_is_one(local: hg.Session, random: np.random.Generator) -> None:
    x = f64(random, 5)

    def slope(x: hg.Value) -> hg.Value:
        first: hg.Value = hg.grad(hg.sum(x**3), x)
        return hg.sum(first)

    (found,) = gradients(local, slope, x)
    close(found, 6 * x)


def test_a_language_model_learns_by_its_gradients(local: hg.Session, random: np.random.Generator) -> None:
    """Embeddings, rotary positions, attention, norms and a gated unit, and differences of its loss."""
    tokens, width, words, heads = 6, 8, 11, 2
    shapes = {
        "words": (words, width), "q": (width, width), "k": (width, width), "v": (width, width),
        "o": (width, width), "scale": (width,), "up": (width, 4 * width), "down": (2 * width, width),
    }  # fmt: skip
    given = {name: random.standard_normal(shape) * 0.5 for name, shape in shapes.items()}
    text, following = random.integers(0, words, (2, tokens)).astype(np.int32)

    def loss(model: dict[str, hg.Value]) -> hg.Value:
        def by_head(name: str, x: hg.Value) -> hg.Value:
            return (x @ model[name]).reshape((tokens, heads, width // heads))

        x = hg.take(model["words"], text, axis=0)
        normed = hg.rms_norm(x) * model["scale"]
        positions = x.graph.constant(np.arange(tokens, dtype=np.int32))
        q, k = (hg.ops.rope(by_head(name, normed), positions, n_dims=4) for name in ("q", "k"))
        q, k, v = (hg.permute_dims(one, (1, 0, 2)) for one in (q, k, by_head("v", normed)))
        mask = np.triu(np.full((tokens, tokens), -np.inf), 1)
        attended = hg.scaled_dot_product_attention(q, k, v, mask)
        x = x + hg.permute_dims(attended, (1, 0, 2)).reshape((tokens, width)) @ model["o"]
        x = x + hg.ops.swiglu(hg.layer_norm(x) @ model["up"]) @ model["down"]
        chosen = hg.take_along_axis(hg.log_softmax(x @ model["words"].T), following[:, None], axis=1)
        return -hg.mean(chosen)

    g = hg.Graph()
    model = {name: g.input(name, shape, "f64") for name, shape in shapes.items()}
    value, slopes = hg.value_and_grad(loss, model)
    g.output("loss", value)
    for name, slope in slopes.items():
        g.output(f"d {name}", slope)
    plan = local.compile(g)
    found = plan.run(given)
    for name, one in given.items():
        direction, length = random.standard_normal(one.shape), 1e-6
        ends = [float(plan.run({**given, name: one + sign * length * direction})["loss"]) for sign in (1, -1)]
        expected = float((found[f"d {name}"] * direction).sum())
        assert (ends[0] - ends[1]) / (2 * length) == pytest.approx(expected, rel=1e-5, abs=1e-8), name


# Structures and totals


def test_gradients_have_the_structure_of_the_variables(local: hg.Session) -> None:
    g = hg.Graph()
    model = {"w": g.variable("w", (2,), "f32"), "layers": [g.input("b", (2,), "f32"), None]}
    loss, found = hg.value_and_grad(lambda m: hg.sum(m["w"] * m["layers"][0]), model)
    assert loss.shape == () and found.keys() == model.keys() and found["layers"][1] is None
    assert found["w"].type == model["w"].type


def test_a_value_on_the_way_counts_for_those_it_is_made_of(local: hg.Session) -> None:
    g = hg.Graph()
    x = g.input("x", (), "f64")
    y = x * 3.0
    dx, dy = hg.grad(y * y, [x, y])
    g.output("dx", dx)
    g.output("dy", dy)
    found = local.compute(g, x=np.float64(2))
    assert (found["dx"], found["dy"]) == (36, 12)


def test_a_stopped_value_counts_as_a_constant(local: hg.Session) -> None:
    x = np.array([0.4, 1.6])
    (found,) = gradients(local, lambda x: hg.sum(x * hg.stop_gradient(x)), x)
    close(found, x)
    # Rounding whose gradient is that of x itself.
    (found,) = gradients(local, lambda x: hg.sum((x + hg.stop_gradient(hg.round(x) - x)) ** 2), x)
    close(found, 2 * np.round(x))


def test_a_variable_is_updated_by_the_gradient_that_was_built_before(local: hg.Session) -> None:
    g = hg.Graph()
    w = g.variable("updated", (), "f64")
    loss = (w - 3.0) ** 2
    hg.assign(w, w - 0.25 * hg.grad(loss, w))
    g.output("loss", loss)
    plan = local.compile(g)
    assert [float(plan.run()["loss"]) for _ in range(3)] == [9, 2.25, 0.5625]


# Refusals


def refused(message: str, loss: Any, variables: Any) -> hg.InvalidGraphError | hg.InvalidArgumentError:
    with pytest.raises((hg.InvalidGraphError, hg.InvalidArgumentError), match=message) as caught:
        hg.grad(loss, variables)
    assert "test_grad.py" in caught.value.origin.source
    return caught.value


def test_what_has_no_gradient_is_refused_with_the_line_of_the_op() -> None:
    g = hg.Graph()
    x = g.input("x", (4,), "f32")
    order = hg.argsort(x)
    error = refused("argsort has no gradient", hg.sum(hg.astype(order, "f32")), x)
    assert "order = hg.argsort(x)" in error.origin.source and "'x' only through it" in error.advice
    whole = hg.round(x)
    assert "whole = hg.round(x)" in refused("round has no gradient", hg.sum(whole), x).origin.source
    error = refused("reshape has no gradient", hg.sum(hg.stop_gradient(x)), x)
    assert "stop_gradient ends it" in error.message


def test_what_is_no_loss_or_no_variable_is_refused() -> None:
    g, other = hg.Graph(), hg.Graph()
    x, n = g.input("x", (4,), "f32"), g.input("n", (4,), "i32")
    loss = hg.sum(x)
    refused("a loss is one float", x, x)
    refused("the loss is i64", hg.sum(n), x)
    refused("no value of a graph", 3.0, x)
    refused(r"variables\['a'\]\[0\] is i32\[4\]: only floats", loss, {"a": [n]})
    refused(r"variables\[1\] is 2", loss, [x, 2])
    refused("belongs to another graph", loss, other.input("x", (4,), "f32"))
    refused("does not depend on 'y'", loss, [x, g.input("y", (2,), "f32")])


def test_gradients_after_an_assignment_of_what_the_loss_read_are_refused() -> None:
    g = hg.Graph()
    w = g.variable("w", (3,), "f32")
    loss = hg.sum(w * w)
    hg.assign(w, w * 0.5)
    refused("'w' was assigned after the loss", loss, w)
    again = hg.sum(w * w)
    assert hg.grad(again, w).type == w.type
