"""The conformance suite itself: which cases there are, that they stay the same, and what it reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from backend_graphs import nothing_left

from heliograph_backends.conformance import CaseOutcome, Result, all_cases, run, select
from heliograph_backends.conformance.harness.case import OpCase
from heliograph_backends.conformance.harness.content import decode, encode
from heliograph_backends.conformance.harness.expected import ExpectedValue, compare
from heliograph_backends.conformance.harness.layouts import IN_MEMORY, gather, lay_out
from heliograph_backends.conformance.harness.outcome import MismatchError
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.graph import LeafKind
from heliograph_proto.ops.table import OPS
from heliograph_proto.types import DTYPES, TensorType

SEED = 20250314


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**28, native=False)) as made:
        yield made


# Cases


#: Ops whose result is one number, which has no strides.
SINGLE = ("sum", "count_equal", "cross_entropy_loss")


def test_every_op_has_cases_plain_strided_and_quick() -> None:
    for op in OPS:
        cases = [case for case in all_cases() if case.group == op and isinstance(case, OpCase)]
        assert any(case.quick for case in cases), op
        assert len(cases) >= 4, op
        assert any(case.into == "spaced" for case in cases) or op in SINGLE, op
        if OPS[op].operands:
            layouts = {one.layout for case in cases for one in case.operands}
            assert "plain" in layouts and layouts & {"transposed", "spaced"}, op
            assert layouts & {"permute", "slice"}, op
        if 0 in OPS[op].in_place:
            assert {"computed", "kept"} <= layouts, op


def test_ids_are_printable_and_unique() -> None:
    ids = [case.id for case in all_cases()]
    assert [one for one, count in Counter(ids).items() if count > 1] == []
    assert all(one.isprintable() and one.isascii() for one in ids)


def test_shapes_are_empty_single_odd_large_broadcast_and_of_eight_dimensions() -> None:
    shapes = {one.type.shape for case in select(op="add") for one in case.operands}  # type: ignore[attr-defined]
    assert any(0 in shape for shape in shapes) and () in shapes
    assert any(len(shape) == 8 for shape in shapes) and any(np.prod(shape) > 50_000 for shape in shapes)
    pairs = [[one.type.shape for one in case.operands] for case in select(op="add")]  # type: ignore[attr-defined]
    assert any(a != b for a, b in pairs)


def test_products_have_weights_bound_and_as_inputs_also_quantized() -> None:
    for op in ("mul_mat", "mul_mat_id", "matmul"):
        kinds = {case.operands[place].kind for case in select(op=op) for place in (0, 1)}  # type: ignore[attr-defined]
        assert kinds == {LeafKind.INPUT, LeafKind.WEIGHT}, op
    ids = {case.id for case in all_cases()}
    assert "mul_mat(q4_0[64, 256], f32[5, 256])" in ids
    assert "mul_mat(q8_0[64, 256] weight, f32[5, 256])" in ids


def test_a_case_has_the_same_data_whatever_else_is_selected() -> None:
    (alone,) = select(match="mul_mat(q4_0[64, 256], f32[5, 256])")
    among = next(case for case in all_cases() if case.id == alone.id)
    assert isinstance(alone, OpCase) and isinstance(among, OpCase)
    first, second = (case.recipe(SEED).leaves for case in (alone, among))
    assert [one.content.raw.tobytes() for one in first] == [one.content.raw.tobytes() for one in second]


def test_another_seed_is_other_data() -> None:
    (case,) = select(match="exp(f32[129, 517])")
    assert isinstance(case, OpCase)
    a, b = (case.recipe(seed).leaves[0].content.raw for seed in (1, 2))
    assert not np.array_equal(a, b)


def test_selecting_nothing_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(InvalidArgumentError, match="did you mean 'mul_mat'"):
        select(op="mul_matt")
    with pytest.raises(InvalidArgumentError, match="no case has"):
        select(op="exp", match="no such text")


def test_the_quick_subset_is_a_part_of_every_group() -> None:
    quick = select(quick=True)
    assert {case.group for case in quick} == {case.group for case in all_cases()}
    assert len(quick) < len(all_cases()) / 2


# Layouts


@pytest.mark.parametrize("layout", IN_MEMORY)
def test_elements_laid_out_in_memory_are_read_back_as_they_were(layout: str) -> None:
    values = np.arange(15.0).reshape(3, 5) if layout != "repeated" else np.tile(np.arange(5.0), (3, 1))
    content = encode(TensorType(DTYPES["f16"], (3, 5)), values)
    laid = lay_out(layout, content)
    assert np.array_equal(gather(laid, laid.image, content.type), content.raw)
    assert (layout == "plain") is (laid.strides == ())


# Comparing


def value(numbers: object, name: str = "f32", tolerance: float = 1e-7) -> ExpectedValue:
    array = np.asarray(numbers, np.float64 if DTYPES[name].is_float else None)
    return ExpectedValue(TensorType(DTYPES[name], array.shape), array, tolerance)


def found(numbers: object, name: str = "f32") -> object:
    array = np.asarray(numbers)
    return encode(TensorType(DTYPES[name], array.shape), array)


@pytest.mark.parametrize(
    ("have", "want", "words"),
    [
        ([1.0, 2.0], [1.0, 2.0], ""),
        ([1.0, 2.01], [1.0, 2.0], "NMSE 2e-05"),
        ([np.nan, 2.0], [1.0, 2.0], "1 elements are NaN on one side alone, first at (0,)"),
        ([1.0, 2.0], [1.0, np.nan], "NaN on one side alone, first at (1,)"),
        ([np.nan, 2.0], [np.nan, 2.0], ""),
        ([np.inf, 2.0], [-np.inf, 2.0], "infinite on one side alone"),
        ([3e38, 2.0], [np.inf, 2.0], "infinite on one side alone"),
        ([np.inf, 2.0], [1e300, 2.0], ""),
        ([0.0, 0.0], [0.0, 0.0], ""),
        ([0.0, 0.001], [0.0, 0.0], "NMSE 5e-07"),
        ([], [], ""),
    ],
)
def test_results_are_compared_as_ggml_does(have: list[float], want: list[float], words: str) -> None:
    if not words:
        compare("y", found(have), value(want))  # type: ignore[arg-type]
        return
    with pytest.raises(MismatchError) as raised:
        compare("y", found(have), value(want))  # type: ignore[arg-type]
    assert words in str(raised.value)


def test_one_wrong_element_among_many_is_found_though_the_mean_hides_it() -> None:
    want = np.ones(100_000)
    have = want.copy()
    have[777] = 0.0
    with pytest.raises(MismatchError, match=r"at \(777,\): 0.0, expected 1"):
        compare("y", found(have), value(want, tolerance=5e-4))  # type: ignore[arg-type]


def test_a_narrow_result_may_be_off_by_its_own_rounding() -> None:
    want = np.array([1.0001, 3.0007, 0.3333])
    compare("y", found(want, "f16"), value(want, "f16"))  # type: ignore[arg-type]


def test_integers_and_exact_rows_must_be_equal() -> None:
    with pytest.raises(
        MismatchError, match=r"1 of 2 elements differ, first at \(1,\): 3, expected exactly 2"
    ):
        compare("y", found([1, 3], "i32"), value([1, 2], "i32", 0.5))  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="expected exactly"):
        compare("y", found([1.0, 2.0000002]), value([1.0, 2.0], tolerance=0.0))  # type: ignore[arg-type]


def test_a_bool_is_0_or_1() -> None:
    with pytest.raises(MismatchError, match="element 2 is the byte 255"):
        decode(TensorType(DTYPES["bool"], (3,)), np.array([0, 1, 255], np.uint8))


# Running


def test_results_come_one_by_one_and_add_up(device: CpuDevice) -> None:
    seen: list[Result] = []
    report = run(device, op="exp", on_result=seen.append)
    assert tuple(seen) == report.results and report.ok
    assert sum(report.counts.values()) == len(seen) == sum(report.by_group["exp"].values())
    assert report.counts[CaseOutcome.FAILED] == 0 and str(report).startswith("cpu0: ")


def test_a_report_is_json(device: CpuDevice) -> None:
    found = json.loads(json.dumps(run(device, op="arange").as_json()))
    assert found["device"] == "cpu0" and found["counts"]["failed"] == 0
    assert found["results"][0]["id"] == "arange(start=0.0, stop=5.0, step=1.0)"
