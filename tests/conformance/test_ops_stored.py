"""The op table on bf16 and on quantized types: what is stored moves as it is, and everything else
is computed in f32 on what it stands for and rounded once."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from backend_graphs import Array, normalised_error, nothing_left, run, same_bits
from op_cases import SEED, Case, t
from op_cases_all import CASES, cases_of
from op_cases_stored import BLOCK_OPERANDS, QUANTIZED, Node, Stored, block_nodes, brain

from heliograph_backends.cpu import CpuDevice
from heliograph_proto.errors import InvalidGraphError, OutOfRangeError
from heliograph_proto.ops.table import OPS, infer
from heliograph_proto.quantization import blocks
from heliograph_proto.quantization.blocks import dequantize, quantize
from heliograph_proto.types import DTYPES, TensorType, dtype


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**30, native=False)) as device:
        yield device


@pytest.fixture
def random() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def result_type(node: Node) -> TensorType:
    made = node.made()
    return made.type(made.outputs[0])


def computed(device: CpuDevice, node: Node) -> Array:
    (found,) = run(device, node.made())
    return found


def as_floats(one: Stored) -> Stored:
    """What is stored as f32."""
    if one.dtype == "bf16":
        return Stored(blocks.from_bits(one.array))
    return Stored(dequantize(one.array, one.dtype)) if one.dtype else one


def on_floats(node: Node, name: str = "f32") -> Node:
    """The same node on f32 or f64."""
    attributes = dict(node.attributes)
    if "dtype" in attributes and attributes["dtype"].is_float:
        attributes["dtype"] = DTYPES[name]
    operands = [as_floats(one) if one.dtype else one for one in node.operands]
    if name == "f64":
        narrow = (np.float16, np.float32) if node.op not in KEEP_F32 else (np.float16,)
        given = zip(node.operands, operands, strict=True)
        operands = [
            Stored(b.array.astype(float)) if a.dtype or a.array.dtype in narrow else b for a, b in given
        ]
    return Node(node.op, operands, attributes)


#: Ops with an operand that is f32 whatever the others are.
KEEP_F32 = ("rope", "rope_back", "soft_max", "flash_attn_ext", "flash_attn_paged")


# bf16


def brain_node(case: Case) -> Node:
    """A case of f16 as one of bf16."""
    attributes = dict(case.attributes)
    if attributes.get("dtype") is DTYPES["f16"]:
        attributes["dtype"] = DTYPES["bf16"]
    return Node(
        case.op, [brain(x) if x.dtype == np.float16 else Stored(x) for x in case.operands], attributes
    )


def brain_nodes(op: str, random: np.random.Generator) -> Iterator[Node]:
    for case in cases_of(op, random):
        halves = any(array.dtype == np.float16 for array in case.operands)
        if halves or case.attributes.get("dtype") is DTYPES["f16"]:
            yield brain_node(case)


@pytest.mark.parametrize("op", [op for op in CASES if op not in ("nextafter", "bitcast")])
def test_bf16_is_computed_in_f32_and_rounded_once(
    op: str, device: CpuDevice, random: np.random.Generator
) -> None:
    """Every case of f16, as one of bf16, against the same op on f32."""
    count = 0
    for node in itertools.islice(brain_nodes(op, random), 100):
        expected = computed(device, on_floats(node))
        result = result_type(node).dtype
        if result is DTYPES["bf16"]:
            expected = blocks.to_bits(expected)
        assert same_bits(computed(device, node), expected.astype(result.storage)), str(node)
        count += 1
    assert count or op in WITHOUT_FLOATS, f"no case of {op} was one of bf16"


def test_the_bf16_after_another_is_the_next_of_its_own_kind(device: CpuDevice) -> None:
    """All of them in order, up and down, and those that no number lies behind."""
    ranks = np.arange(-0x7F80, 0x7F81)
    bits = np.where(ranks < 0, 0x8000 - ranks, ranks).astype(np.uint16)
    infinity, nan = np.uint16(0x7F80), np.uint16(0x7FC0)

    def after(a: Array, b: Array) -> Array:
        return computed(device, Node("nextafter", [Stored(a, "bf16"), Stored(b, "bf16")]))

    up = after(bits, np.full_like(bits, infinity))
    np.testing.assert_array_equal(blocks.from_bits(up[:-1]), blocks.from_bits(bits[1:]))
    assert up[-1] == infinity and up[ranks == -1] == 0x8000
    down = after(bits, np.full_like(bits, infinity | 0x8000))
    np.testing.assert_array_equal(down[1:], bits[:-1])
    np.testing.assert_array_equal(after(bits, bits), bits)
    for a, b in ((bits, np.full_like(bits, nan)), (np.full_like(bits, nan), bits)):
        assert np.isnan(blocks.from_bits(after(a, b))).all()
    zeros = np.array([0, 0x8000], np.uint16)
    np.testing.assert_array_equal(after(zeros, zeros[::-1].copy()), zeros[::-1])


WITHOUT_FLOATS = (
    "arange", "philox", "logical_not", "logical_and", "logical_or", "logical_xor", "bitwise_invert",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift",
)  # fmt: skip


@pytest.mark.parametrize("op", [op for op, row in OPS.items() if row.tolerance])
def test_narrow_floats_are_within_their_tolerance_of_f64(
    op: str, device: CpuDevice, random: np.random.Generator
) -> None:
    for node in itertools.islice(brain_nodes(op, random), 30):
        if op in KEEP_F32 and not node.operands[0].dtype:
            continue
        found, expected = computed(device, node), computed(device, on_floats(node, "f64"))
        made = node.made()
        result = result_type(node)
        if result.dtype is DTYPES["bf16"]:
            found = blocks.from_bits(found)
        allowed = OPS[op].tolerance_for([leaf.type for leaf in made.leaves], result)
        with np.errstate(all="ignore"):
            expected = np.where(np.isinf(expected.astype(found.dtype)), np.inf, expected)
            error = normalised_error(found, expected)
        assert error <= allowed, f"{error} of {allowed}: {node}"


def test_bf16_from_f64_and_integers_is_rounded_once(device: CpuDevice) -> None:
    """Just above the middle of two bf16, which f32 rounds to the middle, and that to even."""
    middle = 1 + 2.0**-8
    values = np.array([middle + 2.0**-40, middle, -middle - 2.0**-40, 1e300, -1e300, 2.0**-140])
    (bits,) = run(device, Node("cast", [Stored(values)], {"dtype": DTYPES["bf16"]}).made())
    expected = np.array([1 + 2.0**-7, 1, -1 - 2.0**-7, np.inf, -np.inf, 0], np.float32)
    expected[-1] = np.float32(2.0**-140)
    np.testing.assert_array_equal(blocks.from_bits(bits), blocks.from_bits(blocks.to_bits(expected)))
    whole = np.array([257, 2**24 + 2**16 + 1, -3, 0], np.int32)
    (bits,) = run(device, Node("cast", [Stored(whole)], {"dtype": DTYPES["bf16"]}).made())
    np.testing.assert_array_equal(blocks.from_bits(bits), np.float32([256, 2**24 + 2**17, -3, 0]))


def test_a_bf16_past_the_range_of_integers_is_no_error_in_any_shape(device: CpuDevice) -> None:
    """What it becomes is the processor's affair, as with f32."""
    for shape in ((), (1,)):
        huge = brain(np.full(shape, 1e38, np.float32))
        assert computed(device, Node("cast", [huge], {"dtype": DTYPES["i64"]})).shape == shape


def test_a_device_needs_no_package_for_bf16(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x = brain(np.float32([1, -2, 3]))
    constant = {"shape": (3,), "value": 0.5, "dtype": DTYPES["bf16"]}
    assert blocks.from_bits(computed(device, Node("fill", [], constant))).tolist() == [0.5] * 3
    for op in ("neg", "cont", "sqr", "soft_max"):
        assert computed(device, Node(op, [x])).dtype == np.uint16


def test_nan_stays_nan_in_bf16_whatever_its_bits(device: CpuDevice) -> None:
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    (found,) = run(device, Node("cast", [Stored(bits.view(np.float32))], {"dtype": DTYPES["bf16"]}).made())
    assert np.isnan(blocks.from_bits(found)).all()


# Blocks


#: Ops that round floats to blocks.
ROUNDED = ("set_rows", "add", "add1")


def compare(device: CpuDevice, node: Node) -> None:
    """The node's result and that of the same node on f32, as the op's row says."""
    result, found = result_type(node), computed(device, node)
    expected = computed(device, on_floats(node))
    if result.dtype.kind == "quantized":
        found = dequantize(found, result.dtype)
        if node.op in ROUNDED:
            rounded = blocks.converted_to_blocks(np.asarray(expected), result.dtype)
            expected = dequantize(rounded, result.dtype)
    elif result.dtype is DTYPES["bf16"]:
        expected = blocks.from_bits(blocks.to_bits(expected))
        found = blocks.from_bits(found)
    assert found.shape == expected.shape, str(node)
    if OPS[node.op].tolerance == 0:
        np.testing.assert_array_equal(found, expected.astype(found.dtype), err_msg=str(node))
    else:
        assert normalised_error(found, expected) < 1e-12, str(node)


@pytest.mark.parametrize("op", [op for op in BLOCK_OPERANDS if op != "set_rows"])
def test_blocks_are_what_they_dequantize_to(op: str, device: CpuDevice, random: np.random.Generator) -> None:
    for name in QUANTIZED:
        for node in block_nodes(op, name, random):
            compare(device, node)


def test_rows_set_among_blocks_are_quantized_and_the_others_stay(
    device: CpuDevice, random: np.random.Generator
) -> None:
    for name in QUANTIZED:
        for node in block_nodes("set_rows", name, random):
            target, rows, indices = (one.array for one in node.operands)
            values = as_floats(node.operands[1]).array.astype(np.float32)
            expected = target.copy()
            for place in np.ndindex(indices.shape):
                rounded = blocks.converted_to_blocks(values[place], DTYPES[name])
                expected[(*place[:-1], indices[place])] = rounded
            np.testing.assert_array_equal(computed(device, node), expected, err_msg=str(node))
            assert rows.shape[:-1] == indices.shape


@pytest.mark.parametrize("name", QUANTIZED)
def test_floats_become_the_blocks_of_ops(name: str, device: CpuDevice, random: np.random.Generator) -> None:
    x = random.standard_normal((3, 4, 3 * DTYPES[name].block_size)).astype(np.float32)
    for one in (Stored(x), Stored(x.astype(np.float16)), brain(x), Stored(x.astype(np.float64))):
        expected = blocks.converted_to_blocks(np.asarray(as_floats(one).array), DTYPES[name])
        np.testing.assert_array_equal(
            computed(device, Node("cast", [one], {"dtype": DTYPES[name]})), expected
        )
        target = Stored(np.zeros((12, expected.shape[-1]), np.uint8), name)
        copied = computed(device, Node("cpy", [one, target]))
        np.testing.assert_array_equal(copied, expected.reshape(12, -1))


def test_a_block_of_what_is_not_finite_is_not_finite(device: CpuDevice) -> None:
    """Nothing crashes, and the other blocks are what they were."""
    for name in QUANTIZED:
        size = DTYPES[name].block_size
        x = np.ones((1, 3 * size), np.float32)
        x[0, 3], x[0, size + 8] = np.nan, np.inf
        found = dequantize(computed(device, Node("cast", [Stored(x)], {"dtype": DTYPES[name]})), name)
        first, second, third = found.reshape(3, size)
        # Scales of mxfp4 and nvfp4 are never NaN or infinite; `hg.quantize` refuses such blocks.
        if name not in ("mxfp4", "nvfp4"):
            assert not np.isfinite(first).any() and not np.isfinite(second).all()
        ones = blocks.converted_to_blocks(np.ones(size, np.float32), DTYPES[name])
        np.testing.assert_array_equal(third, dequantize(ones, name))


# Refusals


@pytest.mark.parametrize(("op", "place"), [(op, n) for op in OPS for n in range(3)])
def test_blocks_are_taken_where_the_table_says_so_alone(op: str, place: int) -> None:
    """One operand of blocks, everywhere else what the op's first case of floats has."""
    row = OPS[op]
    if place >= row.most_operands or place in BLOCK_OPERANDS.get(op, ()) or (op, place) == ("cpy", 1):
        return
    case = max(itertools.islice(cases_of(op, np.random.default_rng(SEED)), 40), key=lambda c: len(c.operands))
    if place >= len(case.operands):
        return
    types = [TensorType(dtype(x.dtype), x.shape) for x in case.operands]
    infer(op, types, case.attributes)
    types[place] = t("q8_0", *types[place].shape)
    with pytest.raises(InvalidGraphError) as caught:
        infer(op, types, case.attributes)
    assert "the result would be" not in str(caught.value)


@pytest.mark.parametrize("op", [op for op, row in OPS.items() if row.operands and op not in BLOCK_OPERANDS])
def test_no_other_op_computes_on_blocks(op: str) -> None:
    """All operands that are floats in a case of the op as blocks: then their data types do not
    differ."""
    cases = cases_of(op, np.random.default_rng(SEED))
    floats = (case for case in cases if any(array.dtype.kind == "f" for array in case.operands))
    case = next(floats, None)
    if case is None:
        return
    types = [TensorType(dtype(x.dtype), x.shape) for x in case.operands]
    types = [TensorType(DTYPES["q8_0"], one.shape) if one.dtype.is_float else one for one in types]
    with pytest.raises(InvalidGraphError) as caught:
        infer(op, types, case.attributes)
    assert "the result would be" not in str(caught.value)


REFUSED = [
    ("permute", [t("q8_0", 2, 64)], {"axes": (1, 0)}, "along the last axis"),
    ("reshape", [t("q8_0", 2, 64)], {"shape": (8, 16)}, "whole blocks of 32"),
    ("reshape", [t("q8_0", 2, 32)], {"shape": (64, 1)}, "whole blocks of 32"),
    ("slice", [t("q8_0", 64)], {"start": (16,), "stop": (64,), "step": (1,)}, "between blocks"),
    ("slice", [t("q8_0", 64)], {"start": (0,), "stop": (48,), "step": (1,)}, "between blocks"),
    ("slice", [t("q8_0", 64)], {"start": (0,), "stop": (64,), "step": (32,)}, "between blocks"),
    ("broadcast_to", [t("q8_0", 32)], {"shape": (2, 64)}, "do not broadcast"),
    ("concat", [t("q8_0", 32), t("q4_0", 32)], {}, "different data types"),
    ("mul_mat", [t("q8_0", 2, 32), t("f64", 3, 32)], {}, "one of them f64"),
    ("mul_mat", [t("f16", 2, 32), t("q8_0", 3, 32)], {}, "takes float"),
    ("mul_mat", [t("q8_0", 2, 32), t("q4_0", 3, 32)], {}, "takes float"),
    ("mul_mat_id", [t("q8_0", 2, 3, 32), t("q5_0", 3, 1, 32), t("i32", 3, 2)], {}, "takes float"),
    ("add", [t("q8_0", 2, 32), t("f16", 2, 32)], {}, "takes float"),
    ("add", [t("f32", 2, 32), t("q8_0", 2, 32)], {}, "takes float"),
    ("add", [t("q8_0", 32), t("f32", 2, 32)], {}, "does not broadcast to the shape"),
    ("mul", [t("q8_0", 2, 32), t("f32", 2, 32)], {}, "takes float"),
    ("add1", [t("q8_0", 2, 32), t("f16", 1)], {}, "takes float"),
    ("set_rows", [t("q8_0", 4, 32), t("q8_0", 2, 32), t("i32", 2)], {}, "takes float"),
    ("set_rows", [t("q8_0", 4, 32), t("i32", 2, 32), t("i32", 2)], {}, "different data types"),
    ("flash_attn_ext", [t("q8_0", 1, 1, 3, 32)] + [t("f32", 1, 1, 3, 32)] * 2, {}, "takes float"),
]


@pytest.mark.parametrize(("op", "types", "attributes", "message"), REFUSED)
def test_blocks_are_not_cut_nor_mixed(
    op: str, types: list[TensorType], attributes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidGraphError, match=message):
        infer(op, types, attributes)


# Indices


def index_nodes() -> Iterator[tuple[Node, int]]:
    """Every op that reads by index, in every storage, and how many things its index can name."""
    source = np.random.default_rng(SEED)
    for name in ("f32", "f16", "bf16", *QUANTIZED):

        def stored(*shape: int, name: str = name) -> Stored:
            x = source.standard_normal(shape).astype(np.float32)
            if name in QUANTIZED:
                return Stored(quantize(x, name), name)
            return brain(x) if name == "bf16" else Stored(x.astype(DTYPES[name].numpy))

        width = max(32, DTYPES[name].block_size)
        rows = Stored(source.standard_normal((2, width)).astype(np.float32))
        yield Node("get_rows", [stored(5, width), Stored(np.zeros(2, np.int32))]), 5
        yield Node("get_rows", [stored(2, 5, width), Stored(np.zeros((2, 2), np.int64))]), 5
        yield Node("set_rows", [stored(5, width), rows, Stored(np.zeros(2, np.int32))]), 5
        tokens = Stored(np.ones((2, 1, width), np.float32))
        yield Node("mul_mat_id", [stored(3, 4, width), tokens, Stored(np.zeros((2, 2), np.int32))]), 3
        if name not in QUANTIZED:
            yield Node("add_id", [stored(2, 32), stored(4, 32), Stored(np.zeros(2, np.int64))]), 4
            for op in ("add_rows", "mul_rows", "max_rows", "min_rows"):
                yield Node(op, [stored(5, 32), stored(2, 32), Stored(np.zeros(2, np.int32))]), 5
            yield Node("get_rows_back", [stored(2, 32), Stored(np.zeros(2, np.int32))], {"rows": 6}), 6
            scan = [(3, 2, 4, 5), (2, 6, 2, 4), (2, 6, 2), (2, 1), (2, 6, 1, 5), (2, 6, 1, 5)]
            yield Node("ssm_scan", [*(stored(*one) for one in scan), Stored(np.zeros(2, np.int64))]), 3


INDEX_OPS = (
    "get_rows", "set_rows", "add_rows", "mul_rows", "max_rows", "min_rows", "mul_mat_id", "add_id",
    "get_rows_back", "ssm_scan",
)  # fmt: skip


def test_every_op_with_indices_is_tested_for_those_outside() -> None:
    named = {
        op for op, row in OPS.items() if any(word.rstrip("?") in ("indices", "ids") for word in row.operands)
    }
    assert named == set(INDEX_OPS) == {node.op for node, _ in index_nodes()}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("op", INDEX_OPS)
def test_an_index_outside_is_an_error_of_its_node_in_every_storage(op: str, native: bool) -> None:
    with nothing_left(CpuDevice(threads=1, memory_bytes=2**28, native=native)) as device:
        for node, count in index_nodes():
            if node.op != op:
                continue
            computed(device, node)
            *others, indices = node.operands
            for wrong in (-1, count, np.iinfo(indices.array.dtype).min, np.iinfo(indices.array.dtype).max):
                bad = indices.array.copy()
                bad.flat[-1] = wrong
                with pytest.raises(
                    OutOfRangeError, match=f"{op}: index {wrong} is not one of {count}"
                ) as error:
                    computed(device, Node(op, [*others, Stored(bad)], node.attributes))
                assert error.value.origin is not None and error.value.origin.node == 0
