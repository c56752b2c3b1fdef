"""Kernels touch no memory behind their operands, which may end where mapped memory does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from backend_graphs import Array, Maker, run, same_bits
from guarded import guarded, guarded_bytes
from kernel_runs import addresses, normal, over
from narrow_views import FLOATS, Operands
from stored_weights import KINDS, stored, stored_name

from heliograph_backends.contract import Abort, DeviceCompileOptions, LeafBindings, Tensor, host_bytes
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import BoundProgram, ProgramBuilder, Status, Stored
from heliograph_backends.cpu.kernels.program.tiles import STREAM_BYTES
from heliograph_proto.types import DTYPES, TensorType

#: Around a word of bytes, a vector of each element, an unrolled loop and a chunk.
LENGTHS = (1, 3, 15, 16, 17, 31, 33, 63, 65, 127, 1027)
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
OF_TWO = ("add", "sub", "mul", "maximum", "minimum")
BITWISE = ("bitwise_and", "bitwise_xor", "bitwise_left_shift")
INTEGERS = ("i8", "u8", "i16", "u16", "i32", "u32")
WIDE = ("i64", "u64", "f64")


def placed(device: CpuDevice, array: Array, type: TensorType) -> Tensor:
    return Tensor(type, device.buffer_from_host(host_bytes(guarded(array))), 0)


def assert_ends_are_kept(device: CpuDevice, made: Maker) -> None:
    """Run a graph whose leaves and outputs end at guards; its results are those of other memory."""
    graph = made.graph()
    expected = run(device, made)
    leaves = zip(made.arrays, graph.leaves, strict=True)
    inputs = [placed(device, array, leaf.type) for array, leaf in leaves]
    types = [graph.type_of(output.value) for output in graph.outputs]
    memory = [guarded_bytes(type.nbytes) for type in types]
    outputs = [
        Tensor(type, device.buffer_from_host(memoryview(each)), 0)
        for type, each in zip(types, memory, strict=True)
    ]
    plan = device.compile(graph, LeafBindings({}, {}), DeviceCompileOptions())
    plan.compute(inputs, outputs, Abort())
    plan.free()
    for tensor in (*inputs, *outputs):
        tensor.buffer.free()
    for found, wanted in zip(memory, expected, strict=True):
        assert same_bits(found, host_array(wanted))


def host_array(array: Array) -> Array:
    return np.frombuffer(array.tobytes(), np.uint8)


def ops_of(made: Maker, name: str, x: int, y: int) -> Sequence[int]:
    """Apply the ops of a data type to one operand or two."""
    if name == "bool":
        logical = ("logical_and", "logical_or", "logical_xor", "equal")
        chosen = made.node("where", x, x, y)
        return [*(made.node(op, x, y) for op in logical), made.node("logical_not", x), chosen]
    compared = [made.node(op, x, y) for op in COMPARISONS]
    results = [*compared, made.node("where", compared[0], x, y), *(made.node(op, x, y) for op in OF_TWO)]
    if name in FLOATS:
        results += [made.node(op, x) for op in ("exp", "gelu", "tanh", "abs", "isnan", "soft_max")]
        results += [made.node("rms_norm", x, eps=1e-5), made.node("argmax", x), made.node("cumsum", x)]
    elif name in INTEGERS:
        results += [made.node(op, x, y) for op in BITWISE]
    return [*results, *(made.node("cast", x, dtype=DTYPES[to]) for to in ("f32", "u8", "i64") if to != name)]


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS, *WIDE, "bool"])
def test_rows_of_any_length_end_at_the_end_of_memory(
    name: str, device: CpuDevice, random: np.random.Generator
) -> None:
    made = Maker()
    operands = Operands(made, random)
    for length in LENGTHS:
        for shape in ((length,), (3, length)):
            x, y = operands.leaf(name, *shape), operands.leaf(name, *shape)
            made.output(*ops_of(made, name, x, y))
    assert_ends_are_kept(device, made)


@pytest.mark.parametrize("columns", LENGTHS)
def test_reductions_and_norms_end_at_the_end_of_memory(
    columns: int, device: CpuDevice, random: np.random.Generator
) -> None:
    made = Maker()
    x, mask = made.input(normal(random, 3, columns)), made.input(normal(random, 3, columns))
    weight, bias = made.input(normal(random, columns)), made.input(normal(random, columns))
    made.output(made.node("soft_max", x, mask), made.node("soft_max", x, scale=0.5))
    made.output(made.node("sum_rows", x), made.node("mean", x), made.node("l2_norm", x))
    made.output(made.node("sum", x), made.node("add", made.node("mul", x, weight), bias))
    assert_ends_are_kept(device, made)


@pytest.mark.parametrize("columns", [1003, 4096])
def test_a_large_soft_max_ends_at_the_end_of_memory(columns: int, random: np.random.Generator) -> None:
    """Its results are written past the caches, a row after the next one is computed."""
    x = guarded(normal(random, STREAM_BYTES // 4 // columns + 1, columns))
    target = guarded(np.zeros_like(x))
    builder = ProgramBuilder()
    builder.soft_max(x.shape, over(0, x), over(1, target))
    assert BoundProgram(builder.build(), addresses([x, target])).run() is Status.OK
    assert np.allclose(target.sum(1), 1)


@pytest.mark.parametrize("rows", [1, 9, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_end_at_the_end_of_memory(
    kind: Stored, rows: int, device: CpuDevice, random: np.random.Generator
) -> None:
    made = Maker()
    weight = made.input(stored(kind, (17, 256), random), stored_name(kind))
    made.output(made.node("mul_mat", weight, made.input(normal(random, rows, 256))))
    assert_ends_are_kept(device, made)
