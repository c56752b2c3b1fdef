"""Cases of gated linear units. (Activations of one operand are in op_cases_basic.)"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from backend_graphs import Array
from op_cases import FLOATS, Case, Cases, Refusal, data, t, wide

erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "reglu": lambda x: np.where(x > 0, x, 0),
    "geglu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x))),
    "geglu_erf": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "geglu_quick": lambda x: x / (1 + np.exp(-1.702 * x)),
    "swiglu": lambda x: x / (1 + np.exp(-x)),
}
SHAPES = ((2,), (0,), (3, 10), (0, 4), (2, 1, 3, 66))


def glu_cases(op: str, random: np.random.Generator) -> Iterator[Case]:
    limit = {"limit": 1.25} if op == "swiglu_clamp" else {}
    for name, shape, swap in itertools.product(FLOATS, SHAPES, (False, True)):
        x = data(random, name, shape)
        halves = np.split(wide(x), 2, -1)
        yield Case(op, [x], gated(op, *halves[:: -1 if swap else 1]), {"swap": swap, **limit})
        gate = data(random, name, shape)
        pair = [wide(x), wide(gate)]
        yield Case(op, [x, gate], gated(op, *pair[:: -1 if swap else 1]), {"swap": swap, **limit})
    if op == "swiglu_oai":
        x, gate = data(random, "f32", (4, 9)), data(random, "f32", (4, 9))
        yield Case(op, [x, gate], oai(wide(x), wide(gate), 0.5, 1.25), {"alpha": 0.5, "limit": 1.25})


def gated(op: str, a: Array, b: Array) -> Array:
    if op == "swiglu_clamp":
        return ACTIVATIONS["swiglu"](np.minimum(a, 1.25)) * np.clip(b, -1.25, 1.25)
    return oai(a, b, 1.702, 7.0) if op == "swiglu_oai" else ACTIVATIONS[op](a) * b


def oai(a: Array, b: Array, alpha: float, limit: float) -> Array:
    a = np.minimum(a, limit)
    return a / (1 + np.exp(-alpha * a)) * (np.clip(b, -limit, limit) + 1)


CASES: dict[str, Cases] = dict.fromkeys((*ACTIVATIONS, "swiglu_clamp", "swiglu_oai"), glu_cases)

F = "f32"
REFUSED: list[Refusal] = [
    ("halves of an odd row", "swiglu", [t(F, 2, 3)], {}, "even number"),
    ("halves of a scalar", "geglu", [t(F)], {}, "at least 1"),
    ("a gate of another shape", "reglu", [t(F, 2, 4), t(F, 4)], {}, "must be equal"),
    ("a gate of another type", "reglu", [t(F, 4), t("f16", 4)], {}, "different data types"),
    ("three for a gate", "geglu", [t(F, 4)] * 3, {}, "takes the operands"),
    ("an infinite alpha", "swiglu_oai", [t(F, 4)], {"alpha": math.inf}, "alpha is inf"),
    ("a limit that is NaN", "swiglu_oai", [t(F, 4)], {"limit": math.nan}, "limit is nan"),
    ("a negative limit", "swiglu_oai", [t(F, 4)], {"limit": -1.0}, "must not be negative"),
    ("no limit", "swiglu_clamp", [t(F, 4)], {}, "needs the attribute 'limit'"),
    ("a limit below 0", "swiglu_clamp", [t(F, 4)], {"limit": -1.0}, "must not be negative"),
    ("a slope that is NaN", "xielu", [t(F, 4)], {"alpha_n": math.nan, "alpha_p": 0.0}, "alpha_n is nan"),
    ("no slopes", "xielu", [t(F, 4)], {}, "needs the attribute"),
]
