"""Rules of elementwise ops."""

from __future__ import annotations

import math

from heliograph_proto.types import DTYPES
from heliograph_server.gateways.ggml_rpc.buffers import RefusedError
from heliograph_server.gateways.ggml_rpc.building import Value
from heliograph_server.gateways.ggml_rpc.ops.rule import F32, Call, Maker, Rule, plain

#: By ggml's numbers.
UNARY = (
    "abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish",
    "hardsigmoid", "exp", "expm1", "softplus", "gelu_erf", "xielu", "floor", "ceil", "round", "trunc",
)  # fmt: skip
AXES = 4
Q8_0, HALVES = DTYPES["q8_0"], (DTYPES["f16"], DTYPES["bf16"])
#: Stands for the largest element of a block of zeros.
SMALLEST = 1e-30
GATED = ("reglu", "geglu", "swiglu", "swiglu_oai", "geglu_erf", "geglu_quick", "swiglu_clamp")


def binary(op: str) -> Rule:
    """The second operand repeats over the first."""

    def make(call: Call) -> Value:
        return call.node(op, call[0], repeated(call, call[1], call.shape(0)))

    return Rule(make, 2)


def repeated(call: Call, value: Value, shape: tuple[int, ...]) -> Value:
    """Return a value that broadcasts to a shape: its sizes are 1 or equal, or it is repeated."""
    found = call.builder.shape(value)
    if all(size in (1, whole) for size, whole in zip(found, shape, strict=True)):
        return value
    return call.node("repeat", value, shape=shape)


def unary(call: Call) -> Value:
    """The op that the first parameter names."""
    number = call.integer(0)
    if not 0 <= number < len(UNARY):
        raise RefusedError(f"unary op {number} is unknown here")
    if UNARY[number] == "round":
        return _rounded(call)
    if UNARY[number] != "xielu":
        return call.node(UNARY[number], call[0])
    beta = call.real(3)
    return call.node(
        "xielu", call[0], alpha_n=_unsoftened(call.real(1) - beta), alpha_p=_unsoftened(call.real(2)),
        beta=beta, eps=call.real(4),
    )  # fmt: skip


def _rounded(call: Call) -> Value:
    """Halves away from zero, as in C."""
    x = call[0]
    whole = call.node("trunc", x)
    rest = call.node("abs", call.node("sub", x, whole))
    half = call.node("fill", shape=(1,) * AXES, value=0.5, dtype=call.dtype(0))
    away = call.node("add", whole, call.node("sgn", x))
    return call.node("where", call.node("greater_equal", rest, half), away, whole)


def _unsoftened(number: float) -> float:
    """The number whose softplus this is."""
    return number if number > 20 else math.log(math.expm1(max(number, 1e-30)))


def gated(call: Call) -> Value:
    """The gated op that the first parameter names."""
    number = call.integer(0)
    if not 0 <= number < len(GATED):
        raise RefusedError(f"gated op {number} is unknown here")
    attributes: dict[str, float | bool] = {"swap": bool(call.integer(1))}
    if GATED[number] == "swiglu_oai":
        attributes["alpha"] = call.real(2)
    if GATED[number] in ("swiglu_oai", "swiglu_clamp"):
        attributes["limit"] = call.real(3)
    x, b, half = call[0], call.optional(1), call.shape(0)[-1] // 2
    if b is None and call.shape(0)[-1] % 2:
        # An element beyond both halves is not read.
        x = call.builder.slice(x, (0,) * AXES, (*call.shape(0)[:-1], 2 * half))
    return call.node(GATED[number], x, b, **attributes)


def converted(call: Call) -> Value:
    """The elements in the order of rows, in the shape and the data type of the result."""
    builder, want = call.builder, call.want
    if want.dtype.kind == "quantized" and call.dtype(0) is not want.dtype:
        given = call[0]
        if want.dtype is Q8_0 and call.dtype(0) in HALVES:
            given = _rounded_to_eight_bits(call)
        return builder.cast(builder.reshape(given, want.shape), want.dtype)
    return builder.reshape(builder.cast(call[0], want.dtype), want.shape)


def _rounded_to_eight_bits(call: Call) -> Value:
    """The numbers that the quanta of q8_0 stand for, as ggml's CPU rounds: of halves many lie in
    the middle of two quanta, where its instructions and its reference differ."""
    builder, count = call.builder, Q8_0.block_size

    def number(value: float) -> Value:
        return call.node("fill", shape=(1, 1), value=value, dtype=F32)

    x = builder.reshape(builder.cast(call[0], F32), (call.want.size // count, count))
    largest = call.node("reduce_max", call.node("abs", x), axes=(1,), keepdims=True)
    factor = call.node("div", number(127.0), call.node("maximum", largest, number(SMALLEST)))
    quanta = call.node("round", call.node("mul", x, factor))
    return call.node("mul", quanta, call.node("div", largest, number(127.0)))


def _arange(call: Call) -> Value:
    made = call.node("arange", start=call.real(0), stop=call.real(1), step=call.real(2))
    count = call.want.size
    found = call.builder.shape(made)[0]
    if found < count:
        raise RefusedError(f"a range of {found} numbers for {count}")
    return call.builder.slice(made, (0,), (count,))


def _add1(call: Call) -> Value:
    return call.node("add1", call[0], call.builder.flat(call[1]))


def _fill(call: Call) -> Value:
    return call.node("fill", shape=call.want.shape, value=call.real(0), dtype=call.want.dtype)


def _add_id(call: Call) -> Value:
    builder = call.builder
    ids = builder.reshape(call[2], call.shape(0)[:-1])
    return call.node("add_id", call[0], call.of_rank(1, 2), ids)


def _source_alone(make: Maker) -> Rule:
    return Rule(make, 1, frozenset((0,)))


RULES: dict[str, Rule] = {
    **{name: binary(name) for name in ("add", "sub", "mul", "div")},
    **{name: plain(name) for name in ("sqr", "sqrt", "log", "sin", "cos")},
    "dup": _source_alone(converted),
    "cpy": _source_alone(converted),
    "cont": _source_alone(converted),
    "add_id": Rule(_add_id, 3),
    "add1": Rule(_add1, 2),
    "scale": plain("scale", scale="f0", bias="f1"),
    "clamp": plain("clamp", min="f0", max="f1"),
    "arange": Rule(_arange, 0, frozenset()),
    "leaky_relu": plain("leaky_relu", slope="f0"),
    "fill": Rule(_fill, 0, frozenset()),
    "unary": _source_alone(unary),
    "glu": Rule(gated, 1),
}
