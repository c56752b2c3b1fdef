"""Damaged and hostile ONNX files end in typed errors that name the node, in little time and memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import FunctionProto, ModelProto, TensorProto, helper
from onnx_models import constant, model, node, perceptron, saved_outside, tensor

import heliograph as hg

#: More than any of these models may take.
MOST_BYTES = 512 * 2**20
MOST_SECONDS = 20


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Neither hangs nor huge allocations."""
    start, before = time.monotonic(), peak()
    yield
    assert time.monotonic() - start < MOST_SECONDS
    assert peak() - before < MOST_BYTES


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def graph_of(made: ModelProto, shapes: Any = None, values: Any = None) -> hg.Graph:
    found: hg.Graph = hg.onnx.load(made.SerializeToString()).graph(shapes, values)
    return found


def one(op: str, inputs: str, constants: Any = (), **attributes: Any) -> ModelProto:
    """A model of one node with the name "bad", whose input x is [2, 3]."""
    return model(
        [node(op, inputs, "y", "bad", **attributes)], [tensor("x", [2, 3])], [tensor("y", None)], constants
    )


def test_a_file_cut_off_anywhere_is_refused_or_read(tmp_path: Path) -> None:
    data = perceptron(2).SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in (*range(0, 200, 7), *range(200, len(data), 97)):
        path.write_bytes(data[:length])
        try:
            hg.onnx.load(path).graph()
        except (hg.InvalidModelError, hg.UnsupportedError):
            continue


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    for data in (b"", b"\x00" * 100, os.urandom(1000), b"PK\x03\x04", b"\x0a" * 5000):
        with pytest.raises(hg.InvalidModelError, match="no ONNX model"):
            hg.onnx.load(data)
    with pytest.raises(hg.InvalidModelError, match="cannot read"):
        hg.onnx.load(tmp_path / "absent.onnx")
    with pytest.raises(hg.InvalidModelError, match="cannot read"):
        hg.onnx.load(tmp_path)


def attention() -> ModelProto:
    """An op whose nodes ONNX makes from the types of its inputs."""
    q = [tensor("q", [1, 2, 3, 4])]
    return model([node("Attention", "q q q", "y", "bad")], q, [tensor("y", None)], opset=23)


def test_changed_bytes_end_in_typed_errors() -> None:
    """Four thousand models with a few bytes replaced or left out, by a printed seed."""
    seed = 20261123
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    made = [perceptron(2), attention(), nested(2), calling([function("F0", "Neg", 2)])]
    for one_model in made:
        data = np.frombuffer(one_model.SerializeToString(), np.uint8)
        # The elements of weights are not structure.
        places = min(data.size, 400)
        for _ in range(1000):
            changed = data.copy()
            changed[rng.integers(0, places, 3)] = rng.integers(0, 256, 3)
            if rng.random() < 0.2:
                changed = np.delete(changed, rng.integers(0, places))
            try:
                hg.onnx.load(changed.tobytes()).graph()
            except hg.HeliographError:
                continue


def test_a_cycle_is_named() -> None:
    made = model(
        [node("Add", "x b", "a", "first"), node("Neg", "a", "b", "second")],
        [tensor("x", [2])],
        [tensor("b", [2])],
    )
    with pytest.raises(
        hg.InvalidModelError, match=r"node 'first' \(Add\): it reads 'b', which nothing before"
    ):
        graph_of(made)


def constants(*arrays: Any) -> list[TensorProto]:
    """Constants that are named a, b, c."""
    return [constant(name, np.asarray(array)) for name, array in zip("abc", arrays, strict=False)]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (one("Concat", "x x", axis="no"), "attribute 'axis' is of another type than INT"),
        (one("Conv", "x x", kernel_shape=[0]), "bad"),
        (one("Transpose", "x", perm=[0, 0]), "bad"),
        (one("Reshape", "x s", [constant("s", np.array([2**40]))]), "bad"),
        (one("Reshape", "x s", [constant("s", np.array([-5, 3]))]), "bad"),
        (one("Gather", "x i", [constant("i", np.array(9))]), "bad"),
        (one("Split", "x s", [constant("s", np.array([-1, 3]))]), "bad"),
        (one("Add", "x"), "input 1 is missing"),
        (one("Add", "x i", [constant("i", np.array(9))]), "no common data type"),
        (one("Nonsense", "x"), "there is no rule for this op"),
        (one("Squeeze", "x s", [constant("s", np.array([0]))]), "are not all of size 1"),
        (one("Softmax", "x", axis=2**40), "axis"),
        (one("Einsum", "x", equation="a,b->" + "c" * 1000), "bad"),
        (one("Einsum", "x " * 1000, equation=",".join(["a"] * 1000)), "1000 operands; 32 are the most"),
        (one("SequenceAt", "x i", [constant("i", np.array(0))]), "no sequence"),
        (one("MatMul", "x x"), "bad"),
        (one("Pad", "x p", [constant("p", np.array([1]))]), "paddings"),
    ],
    ids=lambda given: given.graph.node[0].op_type if isinstance(given, ModelProto) else "",
)
def test_mistyped_nodes_are_named(made: ModelProto, message: str) -> None:
    with pytest.raises((hg.InvalidModelError, hg.UnsupportedError), match=message) as caught:
        graph_of(made)
    assert "'bad'" in caught.value.message


@pytest.mark.parametrize(
    "made",
    [
        one("ConstantOfShape", "s", [constant("s", np.array([2**20, 2**20]))]),
        one("Expand", "x s", [constant("s", np.array([2**30, 2, 3]))]),
        one("Tile", "x s", [constant("s", np.array([2**30, 2**30]))]),
        one("Pad", "x s", [constant("s", np.array([2**40, 0, 0, 0]))], mode="wrap"),
        one("Range", "a b c", constants(np.float32(0), np.float32(1e12), np.float32(1))),
        one("Range", "a b c", constants(0, 2**62, 1)),
        one("OneHot", "a b c", constants([1], 2**40, [0, 1])),
        one("EyeLike", "z", [constant("z", np.zeros((0, 3)))]),
        one("HannWindow", "s", [constant("s", np.array(2**50))]),
        one("Resize", "x _ _ s", [constant("s", np.array([2**40, 3]))], mode="linear"),
        one("DFT", "a b", constants(np.ones((1, 9, 1), np.float32), 2**40)),
        one("LRN", "x", size=2**40),
        one("Loop", "m _", [constant("m", np.array(2**62))], body=helper.make_graph(
            [node("Identity", "c", "d")],
            "endless",
            [tensor("i", [], TensorProto.INT64), tensor("c", [], TensorProto.BOOL)],
            [tensor("d", [], TensorProto.BOOL)],
        )),
    ],
    ids=lambda made: made.graph.node[0].op_type,
)  # fmt: skip
def test_absurd_sizes_allocate_nothing(made: ModelProto) -> None:
    """They are refused, or become nodes of the device, which has a limit of its own."""
    try:
        made = graph_of(made)
    except (hg.InvalidModelError, hg.UnsupportedError) as error:
        assert "'bad'" in error.message


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("SplitToSequence", {}),
        ("LRN", {"size": 2**20}),
        ("AveragePool", {"kernel_shape": [1, 1]}),
        ("MaxPool", {"kernel_shape": [9999, 2]}),
        ("Softmax", {}),
    ],
)
def test_declared_shapes_of_any_size_cost_nothing(op: str, attributes: dict[str, Any]) -> None:
    """They are refused, or nodes of the device."""
    outputs = "s" if op == "SplitToSequence" else "y"
    nodes = [node(op, "x", outputs, "bad", **attributes), node("Identity", "x", "z")]
    for shape in ([2**20, 2, 20_000, 2], [2**62, 2**62, 2, 2], [2**20, 2**10, 2, 2]):
        made = model(nodes, [tensor("x", shape)], [tensor("z", None)])
        try:
            graph_of(made)
        except (hg.InvalidModelError, hg.UnsupportedError) as error:
            assert "'bad'" in error.message or "input 'x'" in error.message


def nested(depth: int) -> ModelProto:
    """An If in an If, and so on."""
    plain = helper.make_graph([node("Identity", "x", "z")], "plain", [], [tensor("z", [2])])
    inner = plain
    for number in range(depth):
        branch = node("If", "c", f"z{number}", f"if{number}", then_branch=inner, else_branch=plain)
        inner = helper.make_graph([branch], "outer", [], [tensor(f"z{number}", [2])])
    return model(
        [node("If", "c", "y", "bad", then_branch=inner, else_branch=plain)],
        [tensor("x", [2]), tensor("c", [], TensorProto.BOOL)],
        [tensor("y", [2])],
    )


def test_nests_of_subgraphs_are_bounded() -> None:
    """Protobuf reads no file with more than about thirty."""
    assert graph_of(nested(20)).outputs
    data = b""
    for _ in range(3000):
        for number in (6, 5, 1):
            data = field(number, data)
    with pytest.raises(hg.InvalidModelError, match="damaged"):
        hg.onnx.load(b"\x08\x08" + field(7, data))


def field(number: int, data: bytes) -> bytes:
    """A field of a Protobuf message."""
    size, length = len(data), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + data


def function(name: str, calls: str, times: int = 1) -> FunctionProto:
    nodes = [helper.make_node(calls, ["a"], [f"b{n}"], domain="own") for n in range(times)]
    last = helper.make_node("Sum", [f"b{n}" for n in range(times)], ["b"])
    return helper.make_function(
        "own",
        name,
        ["a"],
        ["b"],
        [*nodes, last],
        [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)],
    )


def calling(functions: list[FunctionProto]) -> ModelProto:
    made = model(
        [helper.make_node("F0", ["x"], ["y"], name="bad", domain="own")],
        [tensor("x", [2])],
        [tensor("y", [2])],
        functions=functions,
    )
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made


def test_functions_that_call_themselves_are_refused() -> None:
    for functions in ([function("F0", "F0")], [function("F0", "F1"), function("F1", "F0")]):
        made = calling(functions)
        with pytest.raises(hg.UnsupportedError, match="nested deeper than"):
            graph_of(made)
        (missing,) = hg.onnx.supported(made.SerializeToString())
        assert "calls itself" in str(missing)


def test_functions_that_grow_by_powers_are_refused() -> None:
    """Ten calls in each of twelve functions are a trillion nodes."""
    functions = [function(f"F{number}", f"F{number + 1}", 10) for number in range(12)]
    leaf = helper.make_function(
        "own", "F12", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], [helper.make_opsetid("", 20)]
    )
    made = calling([*functions, leaf])
    with pytest.raises(hg.UnsupportedError, match="unroll to more than"):
        graph_of(made)
    assert hg.onnx.supported(made.SerializeToString()) == ()


def test_constants_that_lack_bytes_or_have_absurd_shapes_are_named() -> None:
    for dims, raw in (([2, 3], b"1234"), ([2**40, 2**40], b""), ([-1], b"1234"), ([0, 2**62], b"")):
        made = model([node("Add", "x w", "y", "bad")], [tensor("x", [2, 3])], [tensor("y", None)])
        made.graph.initializer.append(
            TensorProto(name="w", dims=dims, data_type=TensorProto.FLOAT, raw_data=raw)
        )
        with pytest.raises(hg.HeliographError, match=r"'w'|bad"):
            graph_of(made)
    for element in (0, 99, TensorProto.STRING, TensorProto.COMPLEX64):
        made.graph.initializer[0].CopyFrom(
            TensorProto(name="w", dims=[1], data_type=element, raw_data=b"12345678")
        )
        with pytest.raises(hg.HeliographError, match=r"'w'|bad"):
            graph_of(made)


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(bytes(4000))
    folder = tmp_path / "model"
    folder.mkdir()
    path = saved_outside(perceptron(2), folder)
    (folder / "link.bin").symlink_to(secret)
    for location in ("../secret.bin", str(secret), "link.bin", "", ".", "absent.bin", "/dev/zero", "a\0b"):
        made = ModelProto.FromString(path.read_bytes())
        for weight in made.graph.initializer:
            next(one for one in weight.external_data if one.key == "location").value = location
        (folder / "changed.onnx").write_bytes(made.SerializeToString())
        with pytest.raises(hg.InvalidModelError, match=r"outside|no file|cannot be read|damaged"):
            hg.onnx.load(folder / "changed.onnx").graph()
    with pytest.raises(hg.InvalidModelError, match="is not from a file"):
        hg.onnx.load(path.read_bytes()).graph()


@pytest.mark.parametrize(
    ("key", "value"), [("offset", "-4"), ("offset", "99999999"), ("length", "8"), ("offset", "x")]
)
def test_places_outside_of_a_file_are_refused(tmp_path: Path, key: str, value: str) -> None:
    path = saved_outside(perceptron(2), tmp_path)
    made = ModelProto.FromString(path.read_bytes())
    for weight in made.graph.initializer:
        for one in weight.external_data:
            one.value = value if one.key == key else one.value
    path.write_bytes(made.SerializeToString())
    with pytest.raises(hg.InvalidModelError, match="the constant"):
        hg.onnx.load(path).graph()


def test_a_file_beyond_the_bound_of_protobuf_is_not_read(tmp_path: Path) -> None:
    """The error says what to do; the file is sparse."""
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(hg.InvalidModelError, match=r"larger than 2 GiB(.|\n)*in a file beside it"):
        hg.onnx.load(path)


def test_names_that_come_twice_are_refused() -> None:
    twice = model(
        [node("Neg", "x", "y"), node("Abs", "x", "y", "bad")], [tensor("x", [2])], [tensor("y", [2])]
    )
    with pytest.raises(hg.InvalidModelError, match="its output 'y' is computed twice"):
        graph_of(twice)
    inputs = model([node("Neg", "x", "y")], [tensor("x", [2]), tensor("x", [3])], [tensor("y", [2])])
    with pytest.raises(hg.InvalidModelError, match="two inputs are named 'x'"):
        graph_of(inputs)


def test_other_opsets_are_refused() -> None:
    for opset in (-1, 0, 5, 999, 2**62):
        made = model([node("Add", "x x", "y")], [tensor("x", [2])], [tensor("y", [2])], opset=opset)
        with pytest.raises(hg.UnsupportedError, match=f"is of opset {opset}"):
            graph_of(made)
