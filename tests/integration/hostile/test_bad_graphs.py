"""Graphs that no builder would make, written byte by byte: bad types, attributes, shapes and indices. The
server checks them with the rules that the client has, and goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from op_cases import t
from op_cases_stored import Stored
from raw_client import RawSession, f32, graph_of, node, raw_channel, still_serves

import heliograph as hg
from heliograph_proto.quantization.blocks import quantize
from heliograph_proto.types import DTYPES, DType, TensorType
from heliograph_proto.v1 import command_pb2, graph_pb2, tensor_pb2

if TYPE_CHECKING:
    from daemon_urls import DaemonUrls


@pytest.fixture(scope="module")
def raw(daemon: DaemonUrls) -> Iterator[RawSession]:
    """One session for many refusals, which must not end it."""
    with raw_channel(daemon.tcp) as channel:
        session = RawSession(channel).attach()
        yield session
        session.close()
    still_serves(daemon.tcp)


@pytest.mark.parametrize("number", [0, 200, 2**31 - 1, -1, -(2**31), max(tensor_pb2.DataType.values()) + 1])
def test_a_number_that_is_no_dtype_is_refused_wherever_it_stands(raw: RawSession, number: int) -> None:
    wrong = f32(4, 3)
    wrong.data_type = number  # type: ignore[assignment]
    leaf, result, attribute = (graph_of(node("exp", 0)) for _ in range(3))
    leaf.leaves[0].type.CopyFrom(wrong)
    result.nodes[0].result.CopyFrom(wrong)
    attribute.nodes[0].op = "cast"
    attribute.nodes[0].attributes.add(name="dtype", data_type=number)
    for graph in (leaf, result, attribute):
        with pytest.raises(hg.InvalidArgumentError, match=str(number)):
            raw.compile(graph)
    found = raw.failure(allocate=command_pb2.Allocate(tensor=5, type=wrong))
    assert isinstance(found, hg.InvalidArgumentError)


#: Types that pass all checks of a constructor that the wire goes around: what is wrong, the op, the types of
#: its operands, its attributes, the result that the client claims, and a part of the answer.
F, I, Q4_0 = "f32", "i32", "q4_0"  # noqa: E741
WRONG_NODES: list[tuple[str, str, list[TensorType], dict[str, Any], TensorType, str]] = [
    ("a custom op", "map_custom1", [t(F, 4)], {}, t(F, 4), "unknown op"),
    ("a custom op with a pointer", "custom", [t(F, 4)], {"fun": 2**47}, t(F, 4), "unknown op"),
    ("half a block", "cast", [t(Q4_0, 4, 1)], {"dtype": DTYPES[F]}, t(F, 4, 1), "whole blocks of 32"),
    ("half a block out", "cast", [t(F, 1)], {"dtype": DTYPES[Q4_0]}, t(Q4_0, 1), "whole blocks of 32"),
    ("a product of half a block", "mul_mat", [t(Q4_0, 2, 16), t(F, 3, 16)], {}, t(F, 3, 2), "whole blocks"),
    ("shapes that differ", "add", [t(F, 4, 3), t(F, 3, 3)], {}, t(F, 4, 3), "do not broadcast"),
    ("no shared side", "mul_mat", [t(F, 2, 3), t(F, 2, 4)], {}, t(F, 2, 2), "rows have 3 and 4"),
    ("more rows than indices", "get_rows", [t(F, 4, 3), t(I, 2)], {}, t(F, 9, 3), "the graph says"),
    ("rows of other batches", "get_rows", [t(F, 2, 4, 3), t(I, 5, 2)], {}, t(F, 5, 2, 3), "leading"),
    ("indices of f32", "get_rows", [t(F, 4, 3), t(F, 2)], {}, t(F, 2, 3), "i32 or i64"),
    ("rows too long", "set_rows", [t(F, 4, 3), t(F, 2, 9), t(I, 2)], {}, t(F, 4, 3), "differ"),
    ("fewer indices than rows", "set_rows", [t(F, 4, 3), t(F, 2, 3), t(I, 1)], {}, t(F, 4, 3), "one index"),
    ("a block before", "acc", [t(F, 4), t(F, 2)], {"start": (-2,)}, t(F, 4), "is not within"),
    ("a block behind", "set", [t(F, 4), t(F, 2)], {"start": (2**62,)}, t(F, 4), "is not within"),
    ("a slice from before", "slice", [t(F, 4)], {"start": (-4,), "stop": (4,), "step": (1,)}, t(F, 8), "not"),
    ("a step back", "slice", [t(F, 4)], {"start": (0,), "stop": (4,), "step": (-1,)}, t(F, 4), "not within"),
    ("more than a row", "rope", [t(F, 2, 1, 4), t(I, 2)], {"n_dims": 64}, t(F, 2, 1, 4), "n_dims"),
    ("other positions", "rope", [t(F, 2, 1, 4), t(I, 9)], {"n_dims": 4}, t(F, 2, 1, 4), "positions"),
    ("more than a row has", "top_k", [t(F, 2, 4)], {"k": 5}, t(I, 2, 5), "k is 5"),
    ("a kernel of no width", "pool_1d", [t(F, 4)], {"kernel": (0,)}, t(F, 4), "kernel is 0"),
    ("a stride of 0", "pool_1d", [t(F, 4)], {"kernel": (2,), "stride": (0,)}, t(F, 4), "stride is 0"),
    ("no groups", "group_norm", [t(F, 2, 2, 2)], {"groups": 0}, t(F, 2, 2, 2), "groups is 0"),
    ("padding past 2**63", "pad", [t(F, 4)] , {"left": (2**62,), "right": (2**62,)}, t(F, 4), "left is"),
    ("2**63 bytes", "repeat", [t(F, 1)], {"shape": (2**61,)}, t(F, 2**61), "2**63"),
    ("an unknown attribute", "exp", [t(F, 4)], {"nb1": -16}, t(F, 4), "no attribute 'nb1'"),
    ("NaN for eps", "rms_norm", [t(F, 4)], {"eps": math.nan}, t(F, 4), "eps is nan"),
]  # fmt: skip


def wire_type(found: TensorType) -> tensor_pb2.TensorType:
    return tensor_pb2.TensorType(data_type=found.dtype.number, shape=found.shape)


def wire_attribute(name: str, value: Any) -> graph_pb2.Attribute:
    match value:
        case DType():
            return graph_pb2.Attribute(name=name, data_type=value.number)
        case tuple():
            return graph_pb2.Attribute(name=name, integers=graph_pb2.IntegerList(values=value))
        case float():
            return graph_pb2.Attribute(name=name, real=value)
    return graph_pb2.Attribute(name=name, integer=value)


def one_node(
    op: str, operands: list[TensorType], attributes: dict[str, Any], result: TensorType
) -> graph_pb2.Graph:
    """A graph of one node on inputs of these types."""
    leaves = [
        graph_pb2.Leaf(kind=graph_pb2.LEAF_KIND_INPUT, name=f"x{place}", type=wire_type(found))
        for place, found in enumerate(operands)
    ]
    listed = [wire_attribute(*pair) for pair in attributes.items()]
    made = graph_pb2.Node(op=op, operands=range(len(leaves)), attributes=listed, result=wire_type(result))
    return graph_pb2.Graph(
        leaves=leaves, nodes=[made], outputs=[graph_pb2.Output(name="y", value=len(leaves))]
    )


@pytest.mark.parametrize(
    ("op", "operands", "attributes", "result", "words"),
    [wrong[1:] for wrong in WRONG_NODES],
    ids=[wrong[0] for wrong in WRONG_NODES],
)
def test_a_node_that_no_builder_would_make_is_refused(
    raw: RawSession,
    op: str,
    operands: list[TensorType],
    attributes: dict[str, Any],
    result: TensorType,
    words: str,
) -> None:
    with pytest.raises(hg.InvalidArgumentError) as refused:
        raw.compile(one_node(op, operands, attributes, result))
    assert words in str(refused.value)


def test_an_attribute_that_is_said_twice_or_without_a_value_is_refused(raw: RawSession) -> None:
    twice, without = (one_node("top_k", [t(F, 4)], {"k": 1}, t(I, 1)) for _ in range(2))
    twice.nodes[0].attributes.add(name="k", integer=4)
    without.nodes[0].attributes[0].ClearField("integer")
    for graph in (twice, without):
        with pytest.raises(hg.InvalidArgumentError, match="'k'"):
            raw.compile(graph)


def test_half_a_block_is_no_tensor(raw: RawSession) -> None:
    for shape in ((1,), (4, 1), (), (33,)):
        wrong = wire_type(t(Q4_0, *shape))
        found = raw.failure(allocate=command_pb2.Allocate(tensor=5, type=wrong))
        assert isinstance(found, hg.InvalidArgumentError) and "whole blocks" in str(found)
    raw.allocate(6, 64)
    view = command_pb2.View(tensor=7, source=6, type=wire_type(t(Q4_0, 1)))
    assert isinstance(raw.failure(view=view), hg.InvalidArgumentError)


# Indices


def index_graph(op: str, rows: Stored) -> tuple[hg.Graph, dict[str, np.ndarray], int]:
    """A graph that reads by its input `at`, its other inputs, and how many things an index can name."""
    g = hg.Graph()
    table = g.weight("table", rows.array, dtype=rows.dtype or None)
    tokens = np.ones((2, 1, 32), np.float32)
    match op:
        case "get_rows":
            y, given = hg.ops.get_rows(table, g.input("at", (2,), "i32")), {}
        case "set_rows":
            new = g.input("new", (2, 32), "f32")
            y, given = hg.ops.set_rows(table, new, g.input("at", (2,), "i64")), {"new": tokens[:, 0]}
        case "add_id":
            x = g.input("x", (2, 32), "f32")
            y, given = hg.ops.add_id(x, table, g.input("at", (2,), "i32")), {"x": tokens[:, 0]}
        case _:
            x = g.input("x", tokens.shape, "f32")
            y, given = hg.ops.mul_mat_id(table, x, g.input("at", (2, 1), "i32")), {"x": tokens}
    g.output("y", y)
    return g, given, rows.array.shape[0]


@pytest.mark.parametrize("name", ["f32", "q8_0"])
@pytest.mark.parametrize("op", ["get_rows", "set_rows", "add_id", "mul_mat_id"])
def test_an_index_outside_names_its_node_and_the_next_run_is_well(
    session: hg.Session, op: str, name: str
) -> None:
    """The contents of a tensor are never trusted as offsets."""
    if (op, name) == ("add_id", "q8_0"):
        return
    table = np.ones((3, 4, 32) if op == "mul_mat_id" else (5, 32), np.float32)
    rows = Stored(table) if name == "f32" else Stored(quantize(table, name), name)
    g, given, count = index_graph(op, rows)
    plan = session.compile(g)
    port = next(leaf for leaf in g._freeze().inputs if leaf.name == "at").type
    for wrong in (-1, count, 2**31 - 1, -(2**31)):
        at = np.zeros(port.shape, port.dtype.numpy)
        at.flat[-1] = wrong
        with pytest.raises(hg.OutOfRangeError, match=f"{op}: index {wrong} is not one of {count}") as error:
            plan.run(at=at, **given)
        assert error.value.origin is not None and error.value.origin.op == op
    plan.run(at=np.zeros(port.shape, port.dtype.numpy), **given)
