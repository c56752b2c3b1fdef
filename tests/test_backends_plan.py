"""Plans on the CPU: random graphs against an interpreter, variables, aborts, memory, threads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from backend_graphs import (
    Array,
    Loaded,
    Maker,
    loaded,
    nothing_left,
    place,
    remove,
    run,
    same_bits,
    type_of,
    used_bytes,
)

from heliograph_backends.contract import Abort, CompileOptions, LeafBindings, Tensor
from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import available
from heliograph_backends.fake import FakeDevice
from heliograph_proto.errors import (
    CancelledError,
    ComputeFailedError,
    InvalidInputError,
    OutOfMemoryError,
    OutOfRangeError,
    UnknownHandleError,
)
from heliograph_proto.types import F32, TensorType

SEED = 77001
needs_native = pytest.mark.skipif(not available(), reason="numba is not installed")


@pytest.fixture(params=["native", "definition"])
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    """A CPU of two threads, with and without native kernels."""
    native = request.param == "native"
    if native and not available():
        pytest.skip("numba is not installed")
    with nothing_left(CpuDevice(threads=2, memory_bytes=2**28, native=native)) as made:
        yield made


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    with nothing_left(FakeDevice(memory_bytes=2**24)) as made:
        assert isinstance(made, FakeDevice)
        yield made


def floats(*shape: int, seed: int = SEED) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# Random graphs


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
        self.node("assign", variable, self._pick(shape))

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


@pytest.fixture(scope="module")
def devices() -> Iterator[list[CpuDevice]]:
    """Native devices of one, two and three threads."""
    made = [CpuDevice(f"cpu{n}", threads=n, memory_bytes=2**28) for n in (1, 2, 3)]
    yield made
    for device in made:
        device.close()


@needs_native
@pytest.mark.parametrize("block", range(10))
def test_random_graphs_have_the_same_bits_for_any_threads_and_fusion_and_the_right_values(
    block: int, devices: list[CpuDevice]
) -> None:
    for seed in range(30 * block, 30 * block + 30):
        made = RandomGraph(seed)
        outputs, leaves = interpret(made)
        reference = all_of_a_run(devices[0], made)
        for found, expected in zip(reference, outputs + leaves, strict=True):
            assert found.shape == expected.shape
            assert error_of(found, expected) < 1e-4, f"seed {seed}"
        for device in devices:
            for fusion in (True, False):
                again = all_of_a_run(device, made, fusion=fusion)
                assert all(map(same_bits, reference, again)), f"seed {seed}, {device}, fusion={fusion}"


def test_random_graphs_have_the_right_values_on_the_definition(fake: FakeDevice) -> None:
    for seed in range(60):
        made = RandomGraph(seed)
        outputs, leaves = interpret(made)
        for found, expected in zip(all_of_a_run(fake, made), outputs + leaves, strict=True):
            assert error_of(found, expected) < 1e-4, f"seed {seed}"


@needs_native
def test_large_steps_that_workers_share_have_the_same_bits_for_any_threads(devices: list[CpuDevice]) -> None:
    made = Maker()
    x, w, b = made.input(floats(300, 384)), made.weight(floats(384, 500)), made.weight(floats(500))
    product = made.node("gelu_erf", made.node("add", made.node("matmul", x, w), b))
    scores = made.node("soft_max", made.node("matmul", product, made.node("permute", product, axes=(1, 0))))
    made.output(made.node("norm", product), made.node("reduce_sum", scores, axes=(-1,)))
    reference = run(devices[0], made)
    for device in devices:
        for fusion in (True, False):
            assert all(map(same_bits, reference, run(device, made, fusion=fusion)))


def test_a_sum_of_a_norm_and_another_product_is_not_taken_for_its_weight_and_bias(device: CpuDevice) -> None:
    made = Maker()
    x, a, b = (made.input(floats(8, seed=seed)) for seed in range(3))
    made.output(made.node("add", made.node("mul", a, b), made.node("norm", x)))
    swapped = Maker()
    x, a, b = (swapped.input(floats(8, seed=seed)) for seed in range(3))
    normal = swapped.node("norm", x)
    swapped.output(swapped.node("add", swapped.node("mul", a, b), normal))
    for each in (made, swapped):
        (found,), ((expected,), _) = run(device, each), interpret(each)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# Variables


def test_reads_before_an_assignment_see_the_old_value_and_later_ones_the_new(device: CpuDevice) -> None:
    made = Maker()
    v, x = made.variable(floats(4, 8)), made.input(floats(4, 8, seed=1))
    before = made.node("neg", v)
    made.node("assign", v, x)
    made.output(before, made.node("neg", v))
    old, new = run(device, made)
    np.testing.assert_array_equal(old, -made.arrays[v])
    np.testing.assert_array_equal(new, -made.arrays[x])


def test_views_taken_before_an_assignment_keep_the_old_value(device: CpuDevice) -> None:
    made = Maker()
    v, x = made.variable(floats(4, 8)), made.input(floats(4, 8, seed=1))
    views = [
        made.node("permute", v, axes=(1, 0)),
        made.node("reshape", v, shape=(32,)),
        made.node("slice", v, start=(1, 0), stop=(4, 8), step=(2, 3)),
        made.node("broadcast_to", v, shape=(2, 4, 8)),
    ]
    made.node("assign", v, x)
    made.output(*views)
    outputs, _ = interpret(made)
    for found, expected in zip(run(device, made), outputs, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_read_that_fuses_with_a_later_node_still_sees_the_old_value(device: CpuDevice) -> None:
    made = Maker()
    v, x = made.variable(floats(8)), made.input(floats(8, seed=1))
    before = made.node("neg", v)
    made.node("assign", v, x)
    made.output(made.node("add", made.node("neg", before), x))
    (found,) = run(device, made)
    np.testing.assert_array_equal(found, made.arrays[v] + made.arrays[x])


def test_the_result_of_an_assignment_stays_when_the_variable_is_assigned_to_again(device: CpuDevice) -> None:
    made = Maker()
    v = made.variable(floats(8))
    x, y = made.input(floats(8, seed=1)), made.input(floats(8, seed=2))
    first = made.node("assign", v, x)
    made.node("assign", v, y)
    made.output(first, made.node("neg", first), v)
    found = run(device, made)
    for array, expected in zip(found, (made.arrays[x], -made.arrays[x], made.arrays[y]), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_a_variable_can_be_assigned_its_own_transpose(device: CpuDevice) -> None:
    made = Maker()
    v = made.variable(floats(8, 8))
    made.node("assign", v, made.node("permute", v, axes=(1, 0)))
    made.output(v)
    (found,) = run(device, made)
    np.testing.assert_array_equal(found, made.arrays[v].T)


def test_two_variables_can_change_places(device: CpuDevice) -> None:
    made = Maker()
    a, b = made.variable(floats(8)), made.variable(floats(8, seed=1))
    old = made.node("reshape", a, shape=(8,))
    made.node("assign", a, b)
    made.node("assign", b, old)
    made.output(a, b)
    found = run(device, made)
    np.testing.assert_array_equal(found, [made.arrays[b], made.arrays[a]])


def test_a_variable_keeps_its_value_from_run_to_run(device: CpuDevice) -> None:
    made = Maker()
    v = made.variable(np.zeros(4, np.float32))
    made.node("assign", v, made.node("add", v, made.input(np.ones(4, np.float32))))
    made.output(v)
    with loaded(device, made) as it:
        values = [float(it.run()[0][0]) for _ in range(3)]
    assert values == [1, 2, 3]


def test_an_assignment_happens_though_no_output_depends_on_it(device: CpuDevice) -> None:
    made = Maker()
    v, x = made.variable(floats(4)), made.input(floats(4, seed=1))
    made.node("assign", v, x)
    made.output(x)
    it = Loaded(device, made)
    it.run()
    np.testing.assert_array_equal(it.free()[v], made.arrays[x])


# Outputs and inputs


def some_outputs() -> Maker:
    """A result, a view of it, a leaf, and the result again."""
    made = Maker()
    x = made.input(floats(4, 6))
    y = made.node("exp", x)
    made.output(y, made.node("permute", y, axes=(1, 0)), x, y)
    return made


@pytest.mark.parametrize("wanted", [[False] * 4, [True, False, True, False], [False, True, False, True]])
def test_an_output_that_is_not_wanted_is_left_out_and_the_others_are_right(
    wanted: list[bool], device: CpuDevice
) -> None:
    made = some_outputs()
    expected = run(device, made)
    with loaded(device, made) as it:
        for _ in range(2):
            for want, found, right in zip(wanted, it.run(wanted=wanted), expected, strict=True):
                assert (found is None) == (not want)
                assert found is None or same_bits(found, right)


def strided(device: CpuDevice, array: Array) -> Tensor:
    """A tensor with the array's elements and gaps between them."""
    tensor = place(device, np.zeros((*array.shape[:-1], array.shape[-1] * 3), array.dtype))
    *outer, last = tensor.byte_strides
    made = tensor.view(type_of(array), 0, (*outer, last * 3))
    made.array[...] = array
    return made


def test_inputs_may_have_gaps_or_be_unaligned(device: CpuDevice) -> None:
    made = some_outputs()
    expected = run(device, made)
    array = made.arrays[0]
    odd = device.buffer_type.allocate(array.nbytes + 1)
    unaligned = Tensor(type_of(array), odd, 1)
    odd.set(1, memoryview(array.tobytes()))
    with loaded(device, made) as it:
        for tensor in (strided(device, array), unaligned):
            outputs = [place(device, np.zeros_like(right)) for right in expected]
            it.plan.compute([tensor], outputs, Abort())
            assert all(same_bits(remove(one), right) for one, right in zip(outputs, expected, strict=True))
            tensor.buffer.free()


def test_outputs_may_have_gaps_and_what_lies_between_stays(device: CpuDevice) -> None:
    made = some_outputs()
    expected = run(device, made)
    with loaded(device, made) as it:
        outputs = [strided(device, np.zeros_like(right)) for right in expected]
        it.plan.compute(it.inputs, outputs, Abort())
        for tensor, right in zip(outputs, expected, strict=True):
            assert same_bits(np.array(tensor.array), right)
            raw = np.zeros(tensor.buffer.size_bytes, np.uint8)
            tensor.buffer.get(0, memoryview(raw))
            gaps = raw[64:-64].view(np.float32).reshape(-1, 3)[:, 1:]
            assert not gaps.any()
            tensor.buffer.free()


def test_an_input_can_be_host_memory_in_place(device: CpuDevice) -> None:
    made = some_outputs()
    expected = run(device, made)
    data = b"\0" + made.arrays[0].tobytes()
    for offset in (0, 1):
        memory = memoryview(data[1:]) if offset == 0 else memoryview(data)[1:]
        with loaded(device, made) as it:
            tensor = Tensor(type_of(made.arrays[0]), device.buffer_from_host(memory))
            outputs = [place(device, np.zeros_like(right)) for right in expected]
            it.plan.compute([tensor], outputs, Abort())
            assert all(same_bits(remove(one), right) for one, right in zip(outputs, expected, strict=True))


def test_a_tensor_of_another_type_is_refused(device: CpuDevice) -> None:
    with loaded(device, some_outputs()) as it:
        small = place(device, np.zeros((4, 5), np.float32))
        with pytest.raises(InvalidInputError, match=r"f32\[4, 5\] where the plan has f32\[4, 6\]"):
            it.plan.compute([small], [None] * 4, Abort())
        small.buffer.free()
        it.run()


def test_a_tensor_whose_memory_was_freed_is_refused(device: CpuDevice) -> None:
    with loaded(device, some_outputs()) as it:
        gone = place(device, np.zeros((4, 6), np.float32))
        gone.buffer.free()
        with pytest.raises(InvalidInputError, match="freed"):
            it.plan.compute([gone], [None] * 4, Abort())


def test_a_weight_that_is_freed_early_stays_readable_for_its_plan(device: CpuDevice) -> None:
    made = Maker()
    x, w = made.input(floats(5, 8)), made.weight(floats(8, 40))
    made.output(made.node("matmul", x, w), made.node("neg", w))
    expected = run(device, made)
    it = Loaded(device, made)
    it.tensors[w].buffer.free()
    assert all(map(same_bits, it.run(), expected))
    it.plan.free()
    it.tensors[x].buffer.free()


def test_a_plan_of_nothing_but_leaves_returns_them(device: CpuDevice) -> None:
    made = Maker()
    made.output(made.input(floats(3)), made.weight(floats(2)), made.variable(floats(0, 4)))
    assert all(map(same_bits, run(device, made), made.arrays))


def test_no_warning_leaks_from_compiling_or_running(device: CpuDevice) -> None:
    made = Maker()
    made.node("fill", shape=(2,), value=1e300, dtype=F32)
    zero = made.input(np.zeros(4))
    made.output(-1, made.node("div", zero, zero), made.node("log", zero), made.node("cast", zero, dtype=F32))
    run(device, made)


# Errors


def rows_graph(index: int) -> Maker:
    made = Maker()
    rows, at = made.weight(floats(5, 3)), made.input(np.array([0, index], np.int32))
    made.output(made.node("neg", made.node("get_rows", rows, at)))
    return made


@pytest.mark.parametrize("index", [5, -1, 2**31 - 1])
def test_an_index_outside_is_an_error_with_the_node_as_origin(index: int, device: CpuDevice) -> None:
    made = rows_graph(index)
    with loaded(device, made) as it:
        with pytest.raises(OutOfRangeError, match=f"index {index} is not one of 5 rows") as caught:
            it.run()
        assert (caught.value.origin.op, caught.value.origin.node_name) == ("get_rows", "node0")
        it.inputs[0].array[...] = made.arrays[1][...] = 1
        assert it.run()[0] is not None


def test_what_a_script_fails_with_is_what_the_run_raises_and_the_next_succeeds(fake: FakeDevice) -> None:
    with loaded(fake, some_outputs()) as it:
        fake.script.fail("compute", ComputeFailedError("the fan stopped"))
        with pytest.raises(ComputeFailedError, match="the fan stopped"):
            it.run()
        it.run()


def test_a_plan_that_was_freed_does_not_run(device: CpuDevice) -> None:
    it = Loaded(device, some_outputs())
    it.free()
    it.plan.free()
    with pytest.raises(UnknownHandleError, match="freed"):
        it.plan.compute([], [], Abort())


# Abort


def long_graph(dtype: type, nodes: int = 400, size: int = 20_000) -> Maker:
    """A chain that takes a while: far longer than it takes to ask for its end."""
    made = Maker()
    value = made.input(np.ones(size, dtype))
    for _ in range(nodes):
        value = made.node("tanh", value)
    made.output(value)
    return made


class AnnouncedAbort(Abort):
    """Tells when a run has begun to watch it."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = threading.Event()

    @contextmanager
    def watch(self, hook: Callable[[], None]) -> Iterator[None]:
        with super().watch(hook):
            self.watched.set()
            yield


def test_an_abort_before_a_run_cancels_it_and_the_plan_stays_usable(device: CpuDevice) -> None:
    with loaded(device, some_outputs()) as it:
        abort = Abort()
        abort.set()
        for _ in range(2):
            with pytest.raises(CancelledError):
                it.run(abort)
        it.run()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_abort_during_a_run_cancels_it_and_the_plan_stays_usable(dtype: type, device: CpuDevice) -> None:
    with loaded(device, long_graph(dtype, nodes=4000), fusion=False) as it:
        abort = AnnouncedAbort()
        thread = threading.Thread(target=lambda: abort.watched.wait(30) and abort.set())
        thread.start()
        with pytest.raises(CancelledError):
            it.run(abort)
        thread.join()
        assert it.run()[0] is not None


def test_an_abort_at_a_gate_lets_the_run_end_at_once(fake: FakeDevice) -> None:
    with loaded(fake, some_outputs()) as it:
        abort, errors = Abort(), []
        gate = fake.script.hold("compute")

        def compute() -> None:
            try:
                it.plan.compute(it.inputs, [None] * 4, abort)
            except CancelledError as error:
                errors.append(error)

        thread = threading.Thread(target=compute)
        thread.start()
        assert gate.entered.wait(10)
        abort.set()
        thread.join(10)
        assert len(errors) == 1
        it.run()


def test_an_abort_after_a_run_does_not_touch_the_next(device: CpuDevice) -> None:
    with loaded(device, some_outputs()) as it:
        abort = Abort()
        it.run(abort)
        abort.set()
        it.run()


# Memory


def test_a_plan_gives_back_all_that_it_took(device: CpuDevice) -> None:
    made = RandomGraph(3)
    before = used_bytes(device)
    it = Loaded(device, made)
    it.run(wanted=[False] * len(made.outputs))
    it.run()
    it.free()
    assert used_bytes(device) == before


def test_compute_bytes_are_what_the_plan_takes(device: CpuDevice) -> None:
    made = long_graph(np.float64, nodes=5, size=1000)
    it = Loaded(device, made)
    leaves = sum(tensor.buffer.size_bytes for tensor in it.tensors)
    assert it.plan.compute_bytes == used_bytes(device) - leaves
    assert 8000 <= it.plan.compute_bytes <= 3 * 8064
    it.free()


def test_a_plan_that_does_not_fit_is_refused_before_memory_is_taken() -> None:
    made = Maker()
    x = made.input(np.zeros((1, 8), np.float32))
    huge = made.node("broadcast_to", x, shape=(2**40, 8))
    made.output(made.node("reduce_sum", made.node("exp", huge)))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**20)) as small:
        with pytest.raises(OutOfMemoryError, match="bytes free"):
            small.compile(made.graph(), LeafBindings({}, {}), CompileOptions())
        assert used_bytes(small) == 0


def test_a_constant_that_does_not_fit_is_refused_before_memory_is_taken() -> None:
    made = Maker()
    made.output(made.node("arange", start=0, stop=2**50, step=1))
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**20)) as small:
        with pytest.raises(OutOfMemoryError):
            small.compile(made.graph(), LeafBindings({}, {}), CompileOptions())
        assert used_bytes(small) == 0


def product_with(weight: Array) -> Maker:
    made = Maker()
    made.output(made.node("matmul", made.input(floats(4, weight.shape[0])), made.weight(weight)))
    return made


@needs_native
def test_a_packed_weight_is_counted_with_its_padding_and_freed_with_the_weight() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        it = Loaded(device, product_with(floats(1000, 1)))
        others = it.plan.compute_bytes + sum(tensor.buffer.size_bytes for tensor in it.tensors)
        assert used_bytes(device) - others >= 1000 * 32 * 4
        it.free()
        assert used_bytes(device) == 0


@needs_native
def test_plans_share_a_packed_weight() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        made = product_with(floats(64, 64))
        it = Loaded(device, made)
        one = used_bytes(device)
        bindings = LeafBindings({1: it.tensors[1]}, {})
        second = device.compile(it.graph, bindings, CompileOptions())
        assert used_bytes(device) == one + second.compute_bytes
        second.free()
        it.free()


@needs_native
def test_a_packed_weight_that_does_not_fit_is_refused_and_nothing_stays() -> None:
    weight = floats(512, 512)
    with nothing_left(CpuDevice(threads=1, memory_bytes=weight.nbytes + 200_000)) as device:
        tensor = place(device, weight)
        before = used_bytes(device)
        with pytest.raises(OutOfMemoryError):
            device.compile(product_with(weight).graph(), LeafBindings({1: tensor}, {}), CompileOptions())
        assert used_bytes(device) == before
        tensor.buffer.free()


@needs_native
def test_a_weight_that_is_written_is_packed_again_for_the_next_plan() -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**26)) as device:
        made = product_with(floats(64, 64))
        it = Loaded(device, made)
        it.plan.free()
        other = floats(64, 64, seed=9)
        it.tensors[1].buffer.set(it.tensors[1].offset_bytes, memoryview(other.tobytes()))
        it.plan = device.compile(it.graph, LeafBindings({1: it.tensors[1]}, {}), CompileOptions())
        (found,) = it.run()
        it.free()
        made.arrays[1] = other
        np.testing.assert_allclose(found, interpret(made)[0][0], rtol=1e-3, atol=1e-4)


# Streams


def test_one_plan_on_two_streams_runs_one_after_the_other_and_right(device: CpuDevice) -> None:
    made = Maker()
    v = made.variable(np.zeros(64, np.float32))
    made.node("assign", v, made.node("add", v, made.input(np.ones(64, np.float32))))
    made.output(v)
    failures: list[BaseException | None] = []
    with loaded(device, made) as it:
        streams = [device.stream(), device.stream()]
        for _ in range(200):
            for stream in streams:
                stream.submit(lambda: it.plan.compute(it.inputs, [None], Abort()), failures.append)
        for stream in streams:
            stream.synchronize(30)
            stream.close()
        assert it.tensors[v].array.tolist() == [400.0] * 64
    assert failures == [None] * 400


@needs_native
def test_two_plans_on_two_streams_give_the_bits_that_they_give_alone(device: CpuDevice) -> None:
    made = [product_with(floats(384, 384, seed=seed)) for seed in range(2)]
    alone = [run(device, each)[0] for each in made]
    found: list[list[Array]] = [[], []]
    with loaded(device, made[0]) as first, loaded(device, made[1]) as second:
        streams = [device.stream(), device.stream()]
        for _ in range(20):
            for number, it in enumerate((first, second)):

                def work(it: Loaded = it, number: int = number) -> None:
                    (array,) = it.run()
                    assert array is not None
                    found[number].append(array)

                streams[number].submit(work, lambda error: None)
        for stream in streams:
            stream.synchronize(30)
            stream.close()
    for right, arrays in zip(alone, found, strict=True):
        assert len(arrays) == 20
        assert all(same_bits(right, array) for array in arrays)


# Cost


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_large_graph_compiles_in_a_second(dtype: type, device: CpuDevice) -> None:
    """Far above what it takes (a fifth of that), far below what a quadratic pass would take."""
    made = long_graph(dtype, nodes=10_000, size=16)
    graph = made.graph()
    started = time.perf_counter()
    plan = device.compile(graph, LeafBindings({}, {}), CompileOptions())
    elapsed = time.perf_counter() - started
    plan.free()
    assert elapsed < 1.5


def test_a_plan_describes_itself(device: CpuDevice) -> None:
    with loaded(device, some_outputs()) as it:
        assert repr(it.plan).startswith("<CpuPlan of 2 nodes in ") or "FakePlan" in repr(it.plan)


def test_an_empty_type_has_a_place_of_its_own(device: CpuDevice) -> None:
    made = Maker()
    x = made.input(np.zeros((0, 8), np.float32))
    made.output(made.node("exp", x), made.node("reduce_sum", x, axes=(0,)))
    empty, zeros = run(device, made)
    assert empty.shape == (0, 8)
    assert type_of(zeros) == TensorType(F32, (8,))
    assert not zeros.any()
