"""Matrix products with stored weights, one matrix or experts, beside ggml's CPU backend on as many
threads, with rows of f32 and of q8_0.

ggml is the one that is built for this machine, if it is there, with weights in its own order.
The two run in turn, so that a drift of the machine meets both; the note has the shortest run of
each.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figure, rested_turns
from limits import limits

from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.quantization import blocks
from heliograph_proto.types import dtype

sys.path.append(str(Path(__file__).parents[1] / "support"))

from backend_graphs import Maker, normalised_error, place, place_weight
from peers import ggml

#: ggml's library that is built for this machine, which is loaded at the first use.
BUILT = Path(__file__).parents[2] / ".venv-peers" / "ggml-rpc" / "lib" / "libggml.so"
if BUILT.exists():
    os.environ.setdefault("GGML_LIBRARY", str(BUILT))
SIDE = 4096
TYPES = (
    "q4_0", "q8_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
    "mxfp4", "nvfp4", "tq1_0", "tq2_0", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s",
    "q1_0", "q2_0", "f16", "bf16",
)  # fmt: skip
#: The most that a product may take of ggml's time, by the number of rows.
BARS = {1: 1.2, 128: 1.2}
#: Of products with few rows, and with rows of q8_0, by the number of rows.
FEW_BARS = {4: 1.2, 8: 1.2}
ROUNDED_BARS = {1: 1.0, 4: 1.0, 8: 1.0, 128: 1.0}
FEW_TYPES = ("q4_0", "q4_k", "q6_k", "mxfp4")
#: Of products with experts, by the number of tokens.
EXPERT_BARS = {1: 1.2, 64: 1.2}
EXPERT_TYPES = ("f32", "f16", "q8_0", "q4_0", "q4_k", "mxfp4")
EXPERTS, EXPERT_SIDE, USED = 8, 2048, 2
#: Types whose points are searched, and the rows that are repeated of them.
GRIDS, REPEATED = ("iq1", "iq2", "iq3"), 64
#: Rounds, and runs of each in one, by the number of rows.
REPEATS = {1: (12, 10), 4: (8, 6), 8: (8, 6), 64: (8, 3), 128: (6, 2)}
#: ggml quantizes the activations too.
TOLERANCE = 5e-4


def figures() -> Iterator[Figure]:
    """Milliseconds a product."""
    device = CpuDevice("quantized")
    try:
        yield from _products(device)
        yield from _expert_products(device)
    except ggml.MissingError as error:
        print(f"no figures of quantized products: {error}", file=sys.stderr)
    finally:
        device.close()


def _products(device: CpuDevice) -> Iterator[Figure]:
    for name in TYPES:
        weights = stored(name, (SIDE, SIDE))
        few = name in FEW_TYPES
        for rows, bar in (BARS | FEW_BARS if few else BARS).items():
            yield _figure(device, f"{name}-{rows}", _product(name, weights, rows), bar)
        for rows, bar in (ROUNDED_BARS if few else {}).items():
            product = replace(_product(name, weights, rows), rounded=True)
            yield _figure(device, f"{name}-{rows}-q8", product, bar)


def _product(name: str, weights: ggml.Array, rows: int) -> Product:
    x = np.random.default_rng(12).standard_normal((rows, SIDE), np.float32)
    return Product("mul_mat", name, weights, (x,))


def _expert_products(device: CpuDevice) -> Iterator[Figure]:
    """Each token names two of the experts; one token, or many that name all of them."""
    for name in EXPERT_TYPES:
        weights = stored(name, (EXPERTS, EXPERT_SIDE, EXPERT_SIDE))
        for tokens, bar in EXPERT_BARS.items():
            random = np.random.default_rng(13)
            x = random.standard_normal((tokens, 1, EXPERT_SIDE), np.float32)
            named = [random.permutation(EXPERTS)[:USED] for _ in range(tokens)]
            product = Product("mul_mat_id", name, weights, (x, np.array(named, np.int32)))
            yield _figure(device, f"experts-{name}-{tokens}", product, bar)


@dataclass(frozen=True)
class Product:
    """A product to measure: its op, its weights as they are stored, and its other operands."""

    op: str
    dtype: str
    weights: ggml.Array
    inputs: tuple[ggml.Array, ...]
    #: True if ours rounds rows to q8_0 first.
    rounded: bool = False

    @property
    def rows(self) -> int:
        return len(self.inputs[0])

    @property
    def work(self) -> dict[str, float]:
        """The bytes of the weights that are read, and the operations."""
        matrices = 1 if self.op == "mul_mat" else len(self.weights)
        used = 1 if self.op == "mul_mat" else len(np.unique(self.inputs[-1]))
        operations = 2.0 * int(np.prod(self.result_shape)) * self.inputs[0].shape[-1]
        return {"read_bytes": self.weights.nbytes / matrices * used, "operations": operations}

    @property
    def result_shape(self) -> tuple[int, ...]:
        leading = self.inputs[-1].shape if self.op == "mul_mat_id" else self.inputs[0].shape[:-1]
        return (*leading, self.weights.shape[-2])


def stored(name: str, shape: tuple[int, ...]) -> ggml.Array:
    """Normally distributed weights in the form of a data type: some rows, again and again, since
    ggml takes a second and more to quantize all of them.
    """
    rows = min(shape[-2], REPEATED)
    few = np.random.default_rng(11).standard_normal((*shape[:-2], rows, shape[-1]), np.float32)
    return np.tile(_stored(name, few), (1,) * (len(shape) - 2) + (shape[-2] // rows, 1))


def _stored(name: str, values: ggml.Array) -> ggml.Array:
    if name == "bf16":
        return np.asarray(blocks.to_bits(values))
    if name in ggml.NUMPY_TYPES:
        return values.astype(ggml.NUMPY_TYPES[name])
    if name.startswith(GRIDS):
        # ggml takes seconds for some of these.
        return blocks.quantize(values, name)
    return ggml.quantized(values, name)


def _figure(device: CpuDevice, name: str, product: Product, bar: float) -> Figure:
    rounds, runs = REPEATS[product.rows]
    with Peer(product, device.threads) as theirs, _plan(device, product) as (run, result):
        ours, peer = rested_turns(run, theirs.compute, rounds, runs)
        if normalised_error(result, theirs.result()) > TOLERANCE:
            raise RuntimeError(f"{name}: the products differ")
    shortest = f"shortest {min(ours) * 1e3:.3f} and {min(peer) * 1e3:.3f} ms, {device.threads} threads"
    medians = [statistics.median(found) * 1e3 for found in (ours, peer)]
    note = f"{shortest}; {limits().beside(min(ours), **product.work)}"
    return Figure(f"quantized/{name}", *medians, bar, "ms", f"ggml {ggml.version()}", note)


@contextmanager
def _plan(device: CpuDevice, product: Product) -> Iterator[tuple[Callable[[], object], ggml.Array]]:
    """A run of our plan, and the array that it writes."""
    made = Maker()
    name = "" if product.dtype in ggml.NUMPY_TYPES else product.dtype
    weight = made.weight(product.weights, name)
    leaves = [made.input(each) for each in product.inputs]
    rows = made.node("cast", leaves[0], dtype=dtype("q8_0")) if product.rounded else leaves[0]
    made.output(made.node(product.op, weight, rows, *leaves[1:]))
    w = place_weight(device, product.weights, made.type(weight))
    inner = [place(device, each, None) for each in product.inputs]
    y = place(device, np.zeros(product.result_shape, np.float32), None)
    plan = device.compile(made.graph(), LeafBindings({weight: w}, {}), DeviceCompileOptions())
    abort = Abort()
    try:
        yield lambda: plan.compute(inner, [y], abort), y.array
    finally:
        plan.free()
        for each in (w, *inner, y):
            each.buffer.free()


class Peer(ggml.Graph):
    """The same product in ggml, prepared once."""

    def __init__(self, product: Product, threads: int) -> None:
        super().__init__()
        shape = (*product.weights.shape[:-1], product.inputs[0].shape[-1])
        given = {self.input(_TYPES[each.dtype.kind], each.shape): each for each in product.inputs}
        self._product = self.node(product.op, self.weight(product.dtype, shape, product.weights), *given)
        self._shape = product.result_shape
        self._is_repacked = product.op == "mul_mat" and ggml.reorders(product.dtype, shape)
        self._prepared_at = self._prepared([self._product], given, threads)

    def _weights_in(self) -> int:
        return ggml.repacked() if self._is_repacked else super()._weights_in()

    def compute(self) -> None:
        ggml._compute(self._prepared_at)

    def result(self) -> Any:
        return ggml._values_of(self._product).reshape(self._shape)


#: ggml's names of what is not a weight.
_TYPES = {"f": "f32", "i": "i32"}
