"""Graphs for the tests of plans: seeded ones of what plans do, with an interpreter, and small ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from backend_graphs import Array, Loaded, Maker

from heliograph_backends.cpu import CpuDevice
from heliograph_proto.types import F32

SEED = 77001


def floats(*shape: int, seed: int = SEED) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


class RandomGraph(Maker):
    """A seeded graph of what plans do: every kind of step, view and leaf, and several outputs."""

    SHAPES = ((6, 8), (8, 8), (2, 6, 8), (8,), (1, 8), (6, 1), ())

    def __init__(self, seed: int, nodes: int = 40) -> None:
        super().__init__()
        self.random = np.random.default_rng(seed)
        for number in range(6):
            kind = (self.input, self.weight, self.variable)[number % 3]
            kind(self._data(self.SHAPES[number % len(self.SHAPES)]))
        self.weight(self._data((8, 8)))
        self.weight(self._data((8,)))
        self.variables = [place for place, leaf in enumerate(self.leaves) if leaf.kind.value == "variable"]
        for _ in range(nodes):
            self._add()
        values = self._values()
        # Outputs that are leaves, views, duplicates and results.
        self.output(*(int(v) for v in self.random.choice(values, 4)), -len(self.nodes), -len(self.nodes))

    def _data(self, shape: tuple[int, ...]) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def _values(self) -> list[int]:
        return [*range(len(self.leaves)), *(-1 - number for number in range(len(self.nodes)))]

    def _pick(self, *shapes: tuple[int, ...], rank: int = 0) -> int:
        """A value of one of these shapes, or of at least this rank; mostly a recent one."""
        fitting = [v for v in self._values() if not shapes or self.type(v).shape in shapes]
        fitting = [v for v in fitting if self.type(v).ndim >= rank and self.type(v).dtype == F32]
        recent = fitting[-6:] if self.random.random() < 0.7 else fitting
        return int(self.random.choice(recent)) if recent else self.weight(self._data(shapes[0]))

    def _add(self) -> None:
        kinds = [self._unary, self._binary, self._binary, self._product, self._rows, self._affine,
                 self._reduction, self._view, self._view, self._assignment, self._other]  # fmt: skip
        kinds[int(self.random.integers(len(kinds)))]()

    def _unary(self) -> None:
        ops = ["neg", "tanh", "sigmoid", "gelu_erf", "silu", "relu", "sqr", "cont", "sin"]
        self._bounded(self.node(str(self.random.choice(ops)), self._pick()))

    def _bounded(self, value: int) -> None:
        """Squares of squares overflow, so what may grow is held."""
        self.node("clamp", value, min=-4.0, max=4.0)

    def _binary(self) -> None:
        op = str(self.random.choice(["add", "sub", "mul", "maximum", "minimum"]))
        left = self._pick()
        shape = self.type(left).shape
        right = self._pick(shape, shape[-1:], ())
        self._bounded(self.node(op, left, right))

    def _product(self) -> None:
        left = self._pick((6, 8), (8, 8), (2, 6, 8), (1, 8))
        right = self._pick((8, 8))
        if self.random.random() < 0.3:
            right = self.node("permute", right, axes=(1, 0))
        product = self.node("matmul", left, right)
        if self.random.random() < 0.6:
            product = self.node("tanh", self.node("add", product, self._pick((8,))))
        self._bounded(product)

    def _rows(self) -> None:
        x = self._pick(rank=1)
        op = str(self.random.choice(["soft_max", "norm", "rms_norm", "l2_norm"]))
        shape = self.type(x).shape
        if op == "soft_max" and self.random.random() < 0.5:
            self.node(op, x, self._pick(shape, shape[-1:], (*shape[:-1], 1), ()), scale=0.5)
        else:
            self.node(op, x)

    def _affine(self) -> None:
        """A norm with what looks like its weight and bias, in any order."""
        x = self._pick((6, 8), (2, 6, 8), (8,))
        value = self.node(str(self.random.choice(["norm", "rms_norm"])), x)
        for op in ("mul", "add"):
            row = self._pick((8,), (1, 8)) if self.type(value).ndim > 1 else self._pick((8,))
            if self.random.random() < 0.2:
                row = self.node("mul", row, self._pick((8,)))
            pair = (value, row) if self.random.random() < 0.5 else (row, value)
            value = self.node(op, *pair)
        self._bounded(value)

    def _reduction(self) -> None:
        x = self._pick(rank=1)
        op = str(self.random.choice(["reduce_sum", "reduce_mean", "reduce_max", "reduce_min"]))
        axes = (-1,) if self.random.random() < 0.6 else (0,)
        self._bounded(self.node(op, x, axes=axes, keepdims=True))

    def _view(self) -> None:
        x = self._pick(rank=1)
        shape = self.type(x).shape
        match int(self.random.integers(5)):
            case 0:
                halves = (*shape[:-1], 2, shape[-1] // 2)
                self.node("reshape", x, shape=(-1,) if shape[-1] % 2 else halves[-8:])
            case 1:
                self.node("permute", x, axes=tuple(int(a) for a in self.random.permutation(len(shape))))
            case 2 if len(shape) < 4:
                self.node("broadcast_to", x, shape=(2, *shape))
            case 3:
                start = [int(self.random.integers(0, size + 1) // 2) for size in shape]
                step = [int(self.random.integers(1, 3)) for _ in shape]
                self.node("slice", x, start=start, stop=list(shape), step=step)
            case _:
                self.node("concat", x, self._pick(shape), axis=int(self.random.integers(len(shape))))

    def _assignment(self) -> None:
        variable = int(self.random.choice(self.variables))
        shape = self.type(variable).shape
        if self.random.random() < 0.5:
            self.node("reshape", variable, shape=(-1,))
        value = self._pick(shape)
        if shape and self.random.random() < 0.4:
            # Computed in another shape, in which the variable itself may be read.
            flat, other = (self.node("reshape", one, shape=(-1,)) for one in (variable, value))
            sides = (flat, other) if self.random.random() < 0.7 else (other, other)
            value = self.node("reshape", self.node("tanh", self.node("add", *sides)), shape=shape)
        self.node("assign", variable, value)

    def _other(self) -> None:
        match int(self.random.integers(3)):
            case 0:
                self.node("fill", shape=(8,), value=0.75, dtype=F32)
            case 1:
                condition = self.node("less", self._pick(), self._pick(()))
                self.node("where", condition, self._pick(()), self._pick(()))
            case _:
                self.node("leaky_relu", self._pick(), slope=0.25)


def interpret(made: Maker) -> tuple[list[Array], list[Array]]:
    """The outputs and what the leaves hold at last: node after node in float64, every result a copy."""
    values = {number: array.astype(np.float64) for number, array in enumerate(made.arrays)}
    for number, (op, operands, attributes, result) in enumerate(made.nodes):
        found = evaluate(op, [values[value] for value in operands], attributes)
        values[-1 - number] = np.array(np.broadcast_to(found, result.shape))
        if op == "assign":
            values[operands[0]] = np.array(found)
    outputs = [values[value] for value in made.outputs]
    return outputs, [values[number] for number in range(len(made.arrays))]


def evaluate(op: str, x: list[Any], a: dict[str, Any]) -> Any:
    """One node in plain NumPy."""
    simple = {
        "neg": np.negative, "tanh": np.tanh, "sin": np.sin, "sqr": np.square, "cont": np.array,
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "maximum": np.maximum,
        "minimum": np.minimum, "matmul": np.matmul, "less": np.less, "where": np.where,
    }  # fmt: skip
    if op in simple:
        return simple[op](*x)
    return {
        "sigmoid": lambda: 1 / (1 + np.exp(-x[0])),
        "silu": lambda: x[0] / (1 + np.exp(-x[0])),
        "gelu_erf": lambda: 0.5 * x[0] * (1 + erf(x[0] / 2**0.5)),
        "relu": lambda: np.maximum(x[0], 0),
        "leaky_relu": lambda: np.where(x[0] > 0, x[0], x[0] * a["slope"]),
        "clamp": lambda: np.clip(x[0], a["min"], a["max"]),
        "soft_max": lambda: soft_max(x[0] * a.get("scale", 1.0) + (x[1] if len(x) > 1 else 0)),
        "norm": lambda: (x[0] - x[0].mean(-1, keepdims=True)) / np.sqrt(x[0].var(-1, keepdims=True) + 1e-5),
        "rms_norm": lambda: x[0] / np.sqrt((x[0] ** 2).mean(-1, keepdims=True) + 1e-5),
        "l2_norm": lambda: x[0] / np.maximum(np.sqrt((x[0] ** 2).sum(-1, keepdims=True)), 1e-5),
        "reduce_sum": lambda: x[0].sum(a["axes"], keepdims=True),
        "reduce_mean": lambda: x[0].mean(a["axes"], keepdims=True),
        "reduce_max": lambda: x[0].max(a["axes"], keepdims=True),
        "reduce_min": lambda: x[0].min(a["axes"], keepdims=True),
        "reshape": lambda: x[0].reshape(a["shape"]),
        "permute": lambda: x[0].transpose(a["axes"]),
        "broadcast_to": lambda: np.broadcast_to(x[0], a["shape"]),
        "slice": lambda: x[0][tuple(map(slice, a["start"], a["stop"], a["step"]))],
        "concat": lambda: np.concatenate(x, a["axis"]),
        "fill": lambda: np.full(a["shape"], a["value"]),
        "assign": lambda: x[1],
    }[op]()


erf = np.vectorize(math.erf, otypes=[np.float64])


def soft_max(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def error_of(found: Array, expected: Array) -> float:
    """Mean squared difference. Rounding adds up over forty nodes, and norms of near nothing magnify it; a
    value from the wrong place differs by about 1.
    """
    return float(np.square(found * 1.0 - expected).mean()) if expected.size else 0.0


def all_of_a_run(device: CpuDevice, made: Maker, *, fusion: bool = True) -> list[Array]:
    """The outputs of a second run on the same leaves, and what the variables hold then."""
    it = Loaded(device, made, fusion=fusion)
    found = [array for array in it.run() if array is not None]
    return found + it.free()


def some_outputs() -> Maker:
    """A result, a view of it, a leaf, and the result again."""
    made = Maker()
    x = made.input(floats(4, 6))
    y = made.node("exp", x)
    made.output(y, made.node("permute", y, axes=(1, 0)), x, y)
    return made


def long_graph(dtype: type, nodes: int = 400, size: int = 20_000) -> Maker:
    """A chain that takes a while: far longer than it takes to ask for its end."""
    made = Maker()
    value = made.input(np.ones(size, dtype))
    for _ in range(nodes):
        value = made.node("tanh", value)
    made.output(value)
    return made


def product_with(weight: Array) -> Maker:
    made = Maker()
    made.output(made.node("matmul", made.input(floats(4, weight.shape[0])), made.weight(weight)))
    return made
