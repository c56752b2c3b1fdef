"""The op table: every op against NumPy in float64 or Python's integers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from backend_graphs import Array, nothing_left, run, same_bits
from op_cases import FLOATS, INTEGERS, SEED, Case, wide
from op_cases_all import CASES, LAYOUTS, as_it_is, cases_of, check, layouts_of, made_of
from op_cases_attention import soft_max
from op_cases_basic import (
    BINARY,
    UNARY_OF_FLOATS,
    UNARY_OF_NUMBERS,
    WITH_ATTRIBUTES,
    l2_norm,
    norm,
    rms_norm,
)
from op_cases_elementary import OF_ONE

from heliograph_backends.cpu import CpuDevice
from heliograph_backends.cpu.kernels import available
from heliograph_backends.reference import attention, windows
from heliograph_proto.errors import OutOfRangeError
from heliograph_proto.ops.table import OPS, infer
from heliograph_proto.types import DTYPES, TensorType, dtype

# Runs


@pytest.fixture(scope="module")
def definition() -> Iterator[CpuDevice]:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**30, native=False)) as device:
        yield device


@pytest.fixture(scope="module")
def native() -> Iterator[CpuDevice]:
    if not available():
        pytest.skip("numba is not installed")
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**30, native=True)) as device:
        yield device


@pytest.fixture
def random() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def test_every_op_has_cases() -> None:
    assert set(CASES) == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_the_definition_of_an_op_is_what_numpy_says(
    op: str, definition: CpuDevice, random: np.random.Generator
) -> None:
    for number, case in enumerate(cases_of(op, random)):
        (found,) = run(definition, made_of(case, layouts_of(number)))
        check(case, found)


@pytest.mark.parametrize("op", OPS)
def test_native_kernels_give_what_numpy_says_and_the_same_bits_when_fused(
    op: str, native: CpuDevice, random: np.random.Generator
) -> None:
    for number, case in enumerate(cases_of(op, random)):
        if any(array.dtype != np.float32 for array in case.operands):
            continue
        chain = OPS[op].rule(*rule_arguments(case)).dtype.name == "f32"
        for layout in LAYOUTS if number % 4 == 0 else (layouts_of(number),):
            (fused,) = run(native, made_of(case, layout, chain=chain))
            (unfused,) = run(native, made_of(case, layout, chain=chain), fusion=False)
            check(case, fused)
            assert same_bits(fused, unfused), f"{op}: bits depend on fusion"


def rule_arguments(case: Case) -> tuple[list[TensorType], dict[str, Any]]:
    types = [TensorType(dtype(array.dtype), array.shape) for array in case.operands]
    return types, infer(case.op, types, case.attributes)[1]


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 20.0, -20.0, 1e-4, 3e4]


@pytest.mark.parametrize("device", ["definition", "native"])
@pytest.mark.parametrize("op", [*UNARY_OF_FLOATS, *UNARY_OF_NUMBERS, *OF_ONE, *WITH_ATTRIBUTES])
def test_nan_infinity_and_zero_go_through_one_operand_as_in_float64(
    op: str, device: str, request: pytest.FixtureRequest
) -> None:
    for name in FLOATS:
        x = np.array(SPECIAL, DTYPES[name].numpy)
        attributes: Mapping[str, Any] = {}
        of_one = {one: formula for one, (formula, _) in OF_ONE.items()}
        formula = {**UNARY_OF_FLOATS, **UNARY_OF_NUMBERS, **of_one}.get(op)
        if formula is None:
            attributes, formula = WITH_ATTRIBUTES[op][0]
        with np.errstate(all="ignore"):
            case = Case(op, [x], formula(wide(x)), attributes)
        (found,) = run(request.getfixturevalue(device), made_of(case, as_it_is))
        check(case, found)


@pytest.mark.parametrize("device", ["definition", "native"])
@pytest.mark.parametrize("op", BINARY)
def test_nan_infinity_and_zero_go_through_two_operands_as_in_float64(
    op: str, device: str, request: pytest.FixtureRequest
) -> None:
    names, formula = BINARY[op]
    for name in (n for n in FLOATS if n in names):
        values = np.array(SPECIAL[:-1], DTYPES[name].numpy)
        a, b = values[:, None], values[None, :]
        with np.errstate(all="ignore"):
            case = Case(op, [a, b], np.asarray(formula(wide(a), wide(b))))
        (found,) = run(request.getfixturevalue(device), made_of(case, as_it_is))
        check(case, found)


@pytest.mark.parametrize("device", ["definition", "native"])
@pytest.mark.parametrize(
    ("op", "formula"),
    [
        ("reduce_sum", lambda x: x.sum(-1)),
        ("reduce_mean", lambda x: x.mean(-1)),
        ("reduce_max", lambda x: x.max(-1)),
        ("reduce_min", lambda x: x.min(-1)),
        ("soft_max", soft_max),
        ("norm", lambda x: norm(x, 1e-5)),
        ("rms_norm", lambda x: rms_norm(x, 1e-5)),
        ("l2_norm", lambda x: l2_norm(x, 1e-5)),
    ],
)
def test_nan_and_infinity_spoil_their_own_row_alone(
    op: str, formula: Callable[[Array], Array], device: str, request: pytest.FixtureRequest
) -> None:
    for name in FLOATS:
        x = np.random.default_rng(SEED).standard_normal((6, 37)).astype(DTYPES[name].numpy)
        x[1, 5], x[2, 7], x[3, 36] = math.nan, math.inf, -math.inf
        x[4, 3], x[4, 4] = math.inf, -math.inf
        attributes = {"axes": (-1,)} if op.startswith("reduce") else {}
        with np.errstate(all="ignore"):
            case = Case(op, [x], formula(wide(x)), attributes)
        (found,) = run(request.getfixturevalue(device), made_of(case, as_it_is))
        check(case, found)


def test_integers_at_their_bounds_wrap(definition: CpuDevice) -> None:
    for name, op in itertools.product(INTEGERS, ("add", "sub", "mul", "floor_divide", "remainder")):
        bounds = np.iinfo(DTYPES[name].numpy)
        values = np.array([bounds.min, bounds.max, 0, 1, bounds.max // 2], bounds.dtype)
        if bounds.min:
            values = np.append(values, bounds.dtype.type(-1))
        case = Case(op, [values[:, None], values[None, :]], np.zeros(()))
        case.expected = BINARY[op][1](wide(case.operands[0]), wide(case.operands[1]))
        (found,) = run(definition, made_of(case, as_it_is))
        check(case, found)


def test_the_mean_of_small_integers_does_not_wrap(definition: CpuDevice) -> None:
    case = Case("reduce_mean", [np.full(300, 100, np.int8)], np.array(100, object))
    (found,) = run(definition, made_of(case, as_it_is))
    check(case, found)


OUTSIDE: list[tuple[str, list[Array]]] = [
    ("get_rows", [np.zeros((3, 2), np.float32), np.array([0, 3])]),
    ("set_rows", [np.zeros((3, 2), np.float32), np.zeros((2, 2), np.float32), np.array([0, 3])]),
    ("set_rows", [np.zeros((3, 2), np.float32), np.zeros((2, 2), np.float32), np.array([-1, 2])]),
    ("mul_mat_id", [np.zeros((2, 3, 4), np.float32), np.zeros((1, 1, 4), np.float32), np.array([[0, 2]])]),
    ("mul_mat_id", [np.zeros((0, 3, 4), np.float32), np.zeros((1, 1, 4), np.float32), np.array([[0]])]),
    (
        "flash_attn_paged",
        [np.zeros((1, 1, 1, 4), np.float32)]
        + [np.zeros((2, 1, 3, 4), np.float32)] * 2
        + [np.zeros((1, 6), np.float32), np.array([[0, 2]], np.int32)],
    ),
    ("add_id", [np.zeros((1, 4), np.float32), np.zeros((2, 4), np.float32), np.array([-(2**62)])]),
]


@pytest.mark.parametrize("device", ["definition", "native"])
@pytest.mark.parametrize(("op", "operands"), OUTSIDE)
def test_an_index_outside_is_an_error_of_its_node(
    op: str, operands: list[Array], device: str, request: pytest.FixtureRequest
) -> None:
    made = made_of(Case(op, operands, np.zeros(())), as_it_is)
    with pytest.raises(OutOfRangeError, match=f"{op}: index") as caught:
        run(request.getfixturevalue(device), made)
    assert caught.value.origin is not None and caught.value.origin.op == op


@pytest.mark.parametrize(
    "op", ["conv_2d", "conv_2d_dw", "conv_3d", "pool_1d", "pool_2d", "flash_attn_ext", "flash_attn_paged"]
)
def test_results_that_are_computed_in_parts_are_the_same(
    op: str, definition: CpuDevice, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "TILE_ELEMENTS", 40)
    monkeypatch.setattr(attention, "BLOCK_SCORES", 20)
    for case in itertools.islice(cases_of(op, random), 40):
        (found,) = run(definition, made_of(case, as_it_is))
        check(case, found)


HUGE = 2**40
EMPTY: list[tuple[str, list[tuple[int, ...]], dict[str, Any]]] = [
    ("repeat", [(0, 2)], {"shape": (0, HUGE)}),
    ("diag", [(0, 1, 2**24)], {}),
    ("diag_mask_inf", [(0, 2**24, HUGE // 2**24)], {}),
    ("tri", [(0, 2**19, 2**19)], {"type": 0}),
    ("timestep_embedding", [(0,)], {"dim": 2**31 - 1}),
    ("pad", [(0, 3)], {"left": (0, 2**31 - 1), "right": (0, 0), "circular": True}),
    ("pool_2d", [(0, 3, 3)], {"kernel": (2, 2), "padding": (2**30, 1)}),
    ("conv_2d", [(2, 1, 1, 1), (0, 1, 3, 3)], {"padding": (2**30, 1)}),
    ("im2col", [(2, 1, 1, 1), (0, 1, 3, 3)], {"padding": (2**30, 1)}),
]


@pytest.mark.parametrize(("op", "shapes", "attributes"), EMPTY, ids=[case[0] for case in EMPTY])
def test_an_empty_result_takes_no_memory_however_long_its_other_sides_are(
    op: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any], definition: CpuDevice
) -> None:
    operands = [np.zeros(shape, np.float32) for shape in shapes]
    (found,) = run(definition, made_of(Case(op, operands, np.zeros(0), attributes), as_it_is))
    assert found.size == 0
