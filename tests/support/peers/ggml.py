"""ggml itself as a peer, through ctypes: its shared library comes with the package xllamacpp.

A graph here is made, planned and run as a C program would do it:

    with Graph() as graph:
        w = graph.weight("f32", (384, 128), values)      # placed apart, as weights are
        x = graph.input("f32", (8, 128))                 # placed by the graph allocator
        y = graph.node("gelu", graph.node("mul_mat", w, x))
        graph.plan_bytes(y)                              # what ggml-alloc reserves for inputs and nodes
        (found,) = graph.run([y], {x: array})            # NumPy arrays in row-major order

`node` takes the C function's name without `ggml_` and its parameters after the context, in C's
order. Shapes are in row-major order here, so C's are reversed; parameters of `node` are C's own.
ggml aborts the process where a graph is wrong: nothing here catches that.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
from paths import ROOT

from peers.ggml_signatures import LETTERS, NODES, SIGNATURES, FourInts

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

#: ggml's numbers of data types, under our names.
TYPES: dict[str, int] = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q8_1": 9, "q2_k": 10,
    "q3_k": 11, "q4_k": 12, "q5_k": 13, "q6_k": 14, "q8_k": 15, "iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18,
    "iq1_s": 19, "iq4_nl": 20, "iq3_s": 21, "iq2_s": 22, "iq4_xs": 23, "i8": 24, "i16": 25, "i32": 26,
    "i64": 27, "f64": 28, "iq1_m": 29, "bf16": 30, "tq1_0": 34, "tq2_0": 35, "mxfp4": 39, "nvfp4": 40,
    "q1_0": 41, "q2_0": 42,
}  # fmt: skip
TYPE_NAMES = {number: name for name, number in TYPES.items()}
#: Types that NumPy has; elements of others are bytes of blocks, and of bf16 uint16.
NUMPY_TYPES = {"f32": "f4", "f16": "f2", "i8": "i1", "i16": "i2", "i32": "i4", "i64": "i8", "f64": "f8"}
#: Where `make test-peers` puts the package: beside our environment, not into it.
PEERS = ROOT / ".venv-peers" / "ggml"
MAX_DIMENSIONS = 4
DEFAULT_NODES = 4096


class MissingError(RuntimeError):
    """The package with ggml's library is not installed."""


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class _TensorHead(ctypes.Structure):
    """The fields of ggml_tensor, for most of which ggml has no functions."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * MAX_DIMENSIONS),
        ("nb", ctypes.c_size_t * MAX_DIMENSIONS),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
    ]


def library_path() -> Path | None:
    """Return the path of ggml's shared library: what GGML_LIBRARY names, else that of a package.

    None if it is not installed. Imports nothing."""
    if chosen := os.environ.get("GGML_LIBRARY"):
        return Path(chosen)
    found = importlib.util.find_spec("xllamacpp")
    installed = found.submodule_search_locations if found else None
    for folder in (*(installed or ()), PEERS / "xllamacpp"):
        for path in sorted(Path(folder).glob("*.so")):
            return path
    return None


@cache
def library() -> ctypes.CDLL:
    """ggml, loaded once, with the types of its functions. Raises MissingError."""
    path = library_path()
    if path is None:
        raise MissingError("ggml's library is missing: `make test-peers` installs it")
    loaded = ctypes.CDLL(str(path))
    for name, letters in SIGNATURES.items():
        function = getattr(loaded, f"ggml_{name}")
        function.restype, *function.argtypes = (LETTERS[letter] for letter in letters)
    loaded.ggml_init.restype, loaded.ggml_init.argtypes = ctypes.c_void_p, [_InitParams]
    loaded.ggml_set_abort_callback(_ON_ABORT)
    return loaded


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)  # type: ignore[untyped-decorator]
def _ON_ABORT(message: bytes) -> None:
    """Says why, before ggml ends the process; without it ggml would start a debugger for a
    backtrace."""
    os.write(2, b"\nggml: " + message + b"\n")


def version() -> str:
    found: bytes = library().ggml_version()
    return found.decode()


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of a graph, by its address."""

    address: int

    @cached_property
    def _head(self) -> _TensorHead:
        return _TensorHead.from_address(self.address)

    @property
    def type(self) -> str:
        return TYPE_NAMES[self._head.type]

    @property
    def ne(self) -> tuple[int, ...]:
        """C's four sizes, the fastest dimension first."""
        return tuple(self._head.ne)

    @property
    def nb(self) -> tuple[int, ...]:
        """C's byte strides."""
        return tuple(self._head.nb)

    @property
    def shape(self) -> tuple[int, ...]:
        """All four dimensions in row-major order."""
        return self.ne[::-1]

    @property
    def nbytes(self) -> int:
        return int(library().ggml_nbytes(self.address))

    @property
    def description(self) -> str:
        """The op that makes it, as ggml names it; "NONE" for a leaf."""
        found: bytes = library().ggml_op_desc(self.address)
        return found.decode()


def reversed_shape(shape: Sequence[int]) -> list[int]:
    """C's four sizes of a row-major shape. Raises ValueError past four dimensions."""
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"shape {tuple(shape)}: ggml has {MAX_DIMENSIONS} dimensions")
    return [*reversed(shape), *(1,) * (MAX_DIMENSIONS - len(shape))]


@dataclass
class Graph:
    """Leaves, and nodes computed from them, on ggml's CPU backend; ends with its `with` block."""

    nodes: int = DEFAULT_NODES
    _leaves: int = 0
    _context: int = 0
    _values: dict[Tensor, Array] = field(default_factory=dict)
    _freed_by: list[tuple[Any, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        ggml = library()
        size = self.nodes * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(self.nodes, False)
        self._leaves, self._context = (self._own(ggml.ggml_free, _context(size)) for _ in range(2))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._freed_by:
            free, address = self._freed_by.pop()
            free(address)

    def _own(self, free: Any, address: int | None) -> int:
        if not address:
            raise MemoryError("ggml gave no memory")
        self._freed_by.append((free, address))
        return address

    def weight(self, type_name: str, shape: Sequence[int], values: Array | None = None) -> Tensor:
        """A leaf outside of the graph's memory; `values` of the type, or raw bytes, or none yet."""
        made = _leaf(self._leaves, type_name, shape)
        if values is not None:
            self._values[made] = _checked(made, values)
        return made

    def array(self, values: Array, type_name: str | None = None) -> Tensor:
        """A weight with the values, type and shape of a NumPy array."""
        names = {np.dtype(code): name for name, code in NUMPY_TYPES.items()}
        return self.weight(type_name or names[values.dtype], values.shape, values)

    def input(self, type_name: str, shape: Sequence[int]) -> Tensor:
        """A leaf in the graph's memory, which nodes take over after its last use; `run` gives its
        values."""
        made = _leaf(self._context, type_name, shape)
        library().ggml_set_input(made.address)
        return made

    def node(self, name: str, *parameters: Any) -> Tensor:
        """A node by the C function's name and parameters, such as node("rms_norm", x, 1e-5).

        Data types are given by name where C has an enum of them; four numbers as a sequence.
        """
        letters = NODES[name][1:]
        given = [_parameter(value) for value in parameters]
        if letters.startswith("c"):
            given.insert(0, self._context)
        if len(given) != len(letters):
            raise TypeError(f"{name} takes {len(letters)} parameters, not {len(given)}")
        return Tensor(getattr(library(), f"ggml_{name}")(*given))

    def supports(self, node: Tensor) -> bool:
        """Whether the CPU backend computes the node."""
        return bool(library().ggml_backend_supports_op(backend(), node.address))

    def plan_bytes(self, *outputs: Tensor, order: Sequence[Tensor] = ()) -> int:
        """The bytes that ggml's graph allocator reserves for inputs and nodes: its peak, without
        weights.

        Nodes run in the `order` given; others where an output first needs them.
        """
        self._place_leaves()
        ggml = library()
        planned, allocator = self._planned(outputs, order)
        if not ggml.ggml_gallocr_reserve(allocator, planned):
            raise MemoryError("ggml could not reserve the graph's memory")
        return int(ggml.ggml_gallocr_get_buffer_size(allocator, 0))

    def run(
        self, outputs: Sequence[Tensor], inputs: Mapping[Tensor, Array] | None = None, threads: int = 1
    ) -> list[Array]:
        """The outputs' values in row-major order, of four dimensions; of blocks their bytes,
        uint8."""
        graph = self._prepared(outputs, inputs or {}, threads)
        _compute(graph)
        return [_values_of(output) for output in self._contiguous]

    def seconds(
        self,
        outputs: Sequence[Tensor],
        inputs: Mapping[Tensor, Array] | None = None,
        threads: int = 1,
        runs: int = 10,
    ) -> list[float]:
        """How long each of some runs took, after one that is not counted."""
        graph = self._prepared(outputs, inputs or {}, threads)
        _compute(graph)
        found = []
        for _ in range(runs):
            started = time.perf_counter()
            _compute(graph)
            found.append(time.perf_counter() - started)
        return found

    def _prepared(self, outputs: Sequence[Tensor], inputs: Mapping[Tensor, Array], threads: int) -> int:
        """Everything placed and filled; the graph's address."""
        ggml = library()
        self._place_leaves()
        # What is read must lie in order, and a permuted view does not.
        self._contiguous = [
            output if ggml.ggml_is_contiguous(output.address) else self.node("cont", output)
            for output in outputs
        ]
        graph, allocator = self._planned(self._contiguous)
        if not ggml.ggml_gallocr_alloc_graph(allocator, graph):
            raise MemoryError("ggml could not allocate the graph's memory")
        for tensor, values in inputs.items():
            _fill(tensor, _checked(tensor, values))
        ggml.ggml_backend_cpu_set_n_threads(backend(), threads)
        return graph

    def _planned(self, outputs: Sequence[Tensor], order: Sequence[Tensor] = ()) -> tuple[int, int]:
        """The graph of the outputs, and a graph allocator for it."""
        ggml = library()
        graph: int = ggml.ggml_new_graph_custom(self._context, self.nodes, False)
        for node in (*order, *outputs):
            ggml.ggml_build_forward_expand(graph, node.address)
        for output in outputs:
            ggml.ggml_set_output(output.address)
        buffer_type = ggml.ggml_backend_cpu_buffer_type()
        return graph, self._own(ggml.ggml_gallocr_free, ggml.ggml_gallocr_new(buffer_type))

    def _weights_in(self) -> int:
        """The buffer type of leaves outside of the graph's memory."""
        return int(library().ggml_backend_cpu_buffer_type())

    def _place_leaves(self) -> None:
        ggml = library()
        buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(self._leaves, self._weights_in())
        # None: there are no weights, or they have their memory already.
        if buffer:
            self._own(ggml.ggml_backend_buffer_free, buffer)
        while self._values:
            _fill(*self._values.popitem())


def repacked() -> int:
    """The buffer type in which ggml's CPU backend keeps weights in an order of its own; the usual one if
    it has none. Tensors of types that it does not reorder must not be placed there."""
    found = getattr(library(), "_Z35ggml_backend_cpu_repack_buffer_typev", None)
    if found is None:
        return int(library().ggml_backend_cpu_buffer_type())
    found.restype, found.argtypes = ctypes.c_void_p, []
    return int(found())


def reorders(type_name: str, shape: Sequence[int]) -> bool:
    """True if weights of a type and shape have an order of their own in this build, on this machine.

    In that buffer type ggml ends the process for any other weight."""
    buffer_type = repacked()
    if buffer_type == int(library().ggml_backend_cpu_buffer_type()):
        return False
    with Graph() as probe:
        leaf = probe.weight(type_name, shape)
        buffer = library().ggml_backend_alloc_ctx_tensors_from_buft(probe._leaves, buffer_type)
        probe._own(library().ggml_backend_buffer_free, buffer)
        return bool(leaf._head.extra)


@cache
def backend() -> int:
    """ggml's CPU backend, one for the process."""
    found: int = library().ggml_backend_cpu_init()
    return found


def _context(size: int) -> int | None:
    made: int | None = library().ggml_init(_InitParams(size, None, True))
    return made


def _leaf(context: int, type_name: str, shape: Sequence[int]) -> Tensor:
    sizes = (ctypes.c_int64 * MAX_DIMENSIONS)(*reversed_shape(shape))
    made = Tensor(library().ggml_new_tensor(context, TYPES[type_name], MAX_DIMENSIONS, sizes))
    if (made.type, made.ne) != (type_name, tuple(sizes)) or library().ggml_nelements(made.address) != int(
        np.prod(shape, dtype=np.int64)
    ):
        raise RuntimeError(f"ggml {version()} lays tensors out in another way than this module knows")
    return made


def _parameter(value: Any) -> Any:
    """A parameter as C takes it."""
    if isinstance(value, Tensor):
        return value.address
    if isinstance(value, str):
        return TYPES[value]
    return FourInts(*value) if isinstance(value, (list, tuple)) else value


def _checked(tensor: Tensor, values: Array) -> Array:
    values = np.ascontiguousarray(values)
    if values.nbytes != tensor.nbytes:
        raise ValueError(f"{tensor.type}{tensor.shape} has {tensor.nbytes} bytes, not {values.nbytes}")
    return values


def _fill(tensor: Tensor, values: Array) -> None:
    library().ggml_backend_tensor_set(tensor.address, values.ctypes.data, 0, values.nbytes)


def _compute(graph: int) -> None:
    if status := library().ggml_backend_graph_compute(backend(), graph):
        raise RuntimeError(f"ggml's graph ended with status {status}")


def _values_of(tensor: Tensor) -> Array:
    raw = np.empty(tensor.nbytes, np.uint8)
    library().ggml_backend_tensor_get(tensor.address, raw.ctypes.data, 0, raw.nbytes)
    if tensor.type == "bf16":
        return raw.view(np.uint16).reshape(tensor.shape)
    known = NUMPY_TYPES.get(tensor.type)
    return raw.view(known).reshape(tensor.shape) if known else raw


def quantized(values: Array, type_name: str) -> Array:
    """Rows of f32 as ggml's reference quantizes them, uint8 [.., bytes of a row]."""
    ggml, rows = library(), np.ascontiguousarray(values, np.float32)
    number, size = TYPES[type_name], rows.shape[-1]
    row_bytes = size // ggml.ggml_blck_size(number) * ggml.ggml_type_size(number)
    found = np.empty((*rows.shape[:-1], row_bytes), np.uint8)
    if type_name in ("q8_1", "q8_k"):
        # Types of activations: ggml has no public function for them.
        rounded = getattr(ggml, f"quantize_row_{type_name[:-1]}{type_name[-1].upper()}_ref")
        rounded.restype, rounded.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        rounded(rows.ctypes.data, found.ctypes.data, rows.size)
        return found
    ggml.ggml_quantize_chunk(number, rows.ctypes.data, found.ctypes.data, 0, rows.size // size, size, None)
    return found


def time_unary(
    name: str, shape: Sequence[int] = (4096, 4096), threads: int = 1, runs: int = 10, **options: float
) -> float:
    """Median seconds of one elementwise or row op on f32: add, silu, gelu, soft_max, rms_norm, ...

    `options` are the node's further parameters in C's order, such as eps. As in an application the
    operands lie in memory that was written before; the result's memory is written once before the
    clock runs.
    """
    operands = 2 if NODES[name].count("t") > 2 else 1
    random = np.random.default_rng(0)
    with Graph() as graph:
        given = [graph.array(random.standard_normal(shape, np.float32)) for _ in range(operands)]
        node = graph.node(name, *given, *options.values())
        return statistics.median(graph.seconds([node], threads=threads, runs=runs))
