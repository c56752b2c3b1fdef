"""Building graphs: names, operators, freezing. No server."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import numpy as np
import pytest

import heliograph as hg
from heliograph_proto.digests import digest_of
from heliograph_proto.graph import validate
from heliograph_proto.sessions import Limits


@pytest.fixture
def g() -> hg.Graph:
    return hg.Graph()


@pytest.fixture
def x(g: hg.Graph) -> hg.Value:
    return g.input("x", (4, 3), "f32")


def test_a_value_says_what_it_is(g: hg.Graph, x: hg.Value) -> None:
    y = x + 1.0
    assert (y.shape, y.dtype.name, y.ndim, y.size) == ((4, 3), "f32", 2, 12)
    assert repr(y) == "<Value add 'add_1' shape=(4, 3) dtype=f32>"
    assert repr(g) == "<Graph 1 leaf, 2 nodes, 0 outputs>"
    assert len(x) == 4


def test_a_frozen_graph_has_its_leaves_first_and_is_valid(g: hg.Graph, x: hg.Value) -> None:
    y = x * 2.0
    w = g.weight("w", np.ones((3, 2), np.float32))
    g.output("z", y @ w)
    frozen = validate(g._freeze(), Limits())
    assert [leaf.name for leaf in frozen.leaves] == ["x", "w"]
    assert [(node.op, node.operands) for node in frozen.nodes] == [
        ("fill", ()),
        ("mul", (0, 2)),
        ("matmul", (3, 1)),
    ]
    assert frozen.outputs[0].value == 4


def test_scopes_name_leaves_nodes_and_outputs(g: hg.Graph) -> None:
    with g.scope("layer0"), g.scope("attention"):
        ids = g.input("ids", (2,), "f32")
        y = hg.ops.relu(ids, name="gate")
        g.output("y", y)
    assert (ids.name, y.name) == ("layer0/attention/ids", "layer0/attention/gate")
    assert g._freeze().outputs[0].name == "layer0/attention/y"


def test_a_scope_ends_when_its_block_fails(g: hg.Graph) -> None:
    with pytest.raises(ZeroDivisionError), g.scope("broken"):
        1 / 0  # noqa: B018
    assert g.input("x", (), "f32").name == "x"


def test_python_scalars_are_one_node_for_each_type_and_value(g: hg.Graph, x: hg.Value) -> None:
    x + 1.0, x * 1, x - 1.0
    i = g.input("i", (2,), "i32")
    i + 1
    x + -0.0, x + 0.0
    fills = [node for node in g._freeze().nodes if node.op == "fill"]
    assert [(str(one.type), repr(one.attributes["value"])) for one in fills] == [
        ("f32[]", "1.0"), ("i32[]", "1"), ("f32[]", "-0.0"), ("f32[]", "0.0"),
    ]  # fmt: skip


def test_numpy_arrays_become_constants_that_are_copied(g: hg.Graph, x: hg.Value) -> None:
    mine = np.arange(3, dtype=np.float32)
    y = mine + x
    mine[:] = 9
    assert y.shape == (4, 3)
    (array,) = g._contents().values()
    assert array.tolist() == [0.0, 1.0, 2.0]


def test_a_weight_is_not_copied_and_is_hashed_once(g: hg.Graph) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    g.weight("w", array)
    ((digest, kept),) = g._contents().items()
    assert np.shares_memory(kept, array)
    assert digest == digest_of(array.tobytes())
    array[:] = 0
    assert list(g._contents()) == [digest]


def test_a_weight_that_was_written_to_is_another_in_the_next_graph() -> None:
    array = np.zeros(3, np.float32)
    graphs = [hg.Graph(), hg.Graph()]
    for number, one in enumerate(graphs):
        array[0] = number
        one.weight("w", array)
        one._contents()
    assert set(graphs[0]._contents()) != set(graphs[1]._contents())


def test_a_weight_keeps_its_shape_when_it_is_a_scalar_or_not_contiguous(g: hg.Graph) -> None:
    assert g.weight("a", np.float32(2)).shape == ()
    g.weight("b", np.arange(6, dtype=np.int32).reshape(2, 3).T)
    arrays = list(g._contents().values())
    assert [array.shape for array in arrays] == [(), (3, 2)]
    assert all(array.flags.c_contiguous for array in arrays)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        (0, (3,)),
        (-1, (3,)),
        ((slice(1, 3), 2), (2,)),
        ((Ellipsis, None), (4, 3, 1)),
        ((None, slice(None, None, 2)), (1, 2, 3)),
        (slice(3, 1), (0, 3)),
        ((), (4, 3)),
    ],
)
def test_basic_indexing_has_numpys_shapes(x: hg.Value, key: object, shape: tuple[int, ...]) -> None:
    assert x[key].shape == shape == np.empty((4, 3))[key].shape


@pytest.mark.parametrize("key", [5, -5, (0, 0, 0)])
def test_an_index_outside_is_an_index_error(x: hg.Value, key: object) -> None:
    with pytest.raises(IndexError) as caught:
        x[key]
    assert isinstance(caught.value, hg.OutOfRangeError)
    assert "test_builder.py" in caught.value.origin.source


@pytest.mark.parametrize("key", [slice(None, None, 0), "a", 1.5, True, [0.5, 1], (Ellipsis, Ellipsis)])
def test_other_indices_say_what_works(x: hg.Value, key: object) -> None:
    with pytest.raises(hg.InvalidArgumentError) as caught:
        x[key]
    assert caught.value.advice


def test_transposes(g: hg.Graph, x: hg.Value) -> None:
    assert x.T.shape == (3, 4)
    assert g.input("b", (2, 3, 4), "f32").mT.shape == (2, 4, 3)
    assert x.reshape(2, -1).shape == x.reshape((2, 6)).shape == (2, 6)


def test_operators_lower_to_the_op_table(x: hg.Value) -> None:
    ops = {
        "add": x + x, "sub": x - x, "mul": x * x, "div": x / x, "floor_divide": x // x, "remainder": x % x,
        "pow": x**x, "sqr": x**2, "neg": -x, "abs": abs(x),
        "equal": x == x, "not_equal": x != x, "less": x < x,
        "less_equal": x <= x, "greater": x > x, "greater_equal": x >= x, "matmul": x @ x.T,
        "logical_and": (x > x) & (x < x), "logical_or": (x > x) | (x < x), "logical_xor": (x > x) ^ (x < x),
        "logical_not": ~(x > x),
    }  # fmt: skip
    for op, value in ops.items():
        assert value.op == op


def test_reflected_operators_keep_the_order_of_their_operands(g: hg.Graph, x: hg.Value) -> None:
    y = 2.0 - x
    node = g._freeze().nodes[-1]
    assert (y.op, node.operands) == ("sub", (1, 0))
    assert (np.ones(3, np.float32) - x).op == "sub"


@pytest.mark.parametrize(
    "use", [bool, iter, float, int, np.asarray, lambda v: v in [0.0], lambda v: 1 if v else 0]
)
def test_values_have_no_elements_and_say_what_to_do(x: hg.Value, use: object) -> None:
    with pytest.raises(TypeError, match="while the graph is being built"):
        use(x)  # type: ignore[operator]


def test_values_of_two_graphs_do_not_mix(x: hg.Value) -> None:
    other = hg.Graph().input("x", (4, 3), "f32")
    with pytest.raises(hg.InvalidArgumentError, match="another graph"):
        x + other
    with pytest.raises(hg.InvalidArgumentError, match="another graph"):
        x.graph.output("y", other)


def test_assign_writes_a_variable(g: hg.Graph) -> None:
    v = g.variable("count", (2,), "f32")
    new = hg.assign(v, v + 1.0)
    assert (new.op, new.shape) == ("assign", (2,))
    assert hg.assign(v, 0).shape == (2,)
    with pytest.raises(hg.InvalidGraphError, match="no variable"):
        hg.assign(new, new)
    with pytest.raises(hg.InvalidGraphError, match="types must be equal|types"):
        hg.assign(v, g.input("y", (3,), "f32"))


def test_names_are_unique_and_printable(g: hg.Graph, x: hg.Value) -> None:
    for name in ("x", "", "a\nb", "n" * 1025):
        with pytest.raises(hg.InvalidGraphError):
            g.input(name, (), "f32")
    g.weight("x", np.zeros(1, np.float32))
    g.output("y", x)
    with pytest.raises(hg.InvalidGraphError, match="two outputs"):
        g.output("y", x)


def test_a_constant_never_takes_the_name_of_a_weight(g: hg.Graph) -> None:
    g.weight("constant_1", np.zeros(2, np.float32))
    g.output("y", g.constant(np.arange(2.0)))
    validate(g._freeze(), Limits())


@pytest.mark.parametrize(
    ("elements", "name"),
    [
        (1.5, "f32"),
        ([1.0, 2.0], "f32"),
        (3, "i64"),
        (True, "bool"),
        (np.float64(1), "f64"),
        (np.ones(2), "f64"),
    ],
)
def test_constants_of_python_numbers_are_f32_and_i64(g: hg.Graph, elements: object, name: str) -> None:
    assert g.constant(elements).dtype.name == name  # type: ignore[arg-type]


@pytest.mark.parametrize("array", [np.array("text"), np.array([1 + 2j]), np.array([None])])
def test_arrays_that_no_tensor_can_be_are_refused(g: hg.Graph, array: np.ndarray) -> None:
    with pytest.raises(hg.InvalidGraphError):
        g.weight("w", array)


def test_raw_ops_have_signatures_and_documentation(g: hg.Graph, x: hg.Value) -> None:
    y = hg.ops.soft_max(x, scale=0.5, name="s")
    assert (y.op, y.name, g._freeze().nodes[-1].attributes) == (
        "soft_max",
        "s",
        {"scale": 0.5, "max_bias": 0.0},
    )
    assert "soft_max" in dir(hg.ops) and "scale" in str(hg.ops.soft_max.__doc__)
    assert hg.ops.arange(graph=g, start=0, stop=3, step=1).shape == (3,)
    assert hg.ops.cast(x, dtype="i32").dtype.name == "i32"
    assert hg.ops.reshape(x, shape=np.array([3, 4])).shape == (3, 4)


def test_an_unknown_raw_op_suggests_a_near_one() -> None:
    with pytest.raises(AttributeError, match="did you mean 'soft_max'"):
        hg.ops.softmax  # noqa: B018


@pytest.mark.slow
def test_a_graph_of_a_hundred_thousand_nodes_is_built_without_recursion(g: hg.Graph) -> None:
    y = g.input("y", (), "f32")
    for _ in range(100_000):
        y = -y
    g.output("y", y)
    assert len(g._freeze().nodes) == 100_000


def test_every_exported_name_is_there() -> None:
    assert len(set(hg.__all__)) == len(hg.__all__)
    for name in hg.__all__:
        assert getattr(hg, name) is not None


def test_every_lazy_name_is_in_its_module() -> None:
    for module, names in hg._LAZY.items():
        found = importlib.import_module(module)
        listed = names.split()
        assert all(getattr(found, name) is getattr(hg, name) for name in listed)
        if module == "heliograph.errors" or module.startswith("heliograph.functions."):
            assert listed == found.__all__


def test_importing_and_the_help_load_no_numpy_grpc_or_protobuf() -> None:
    code = """
import sys, heliograph, heliograph.cli
try:
    heliograph.cli.main(["--help"])
except SystemExit as end:
    print(end.code, {"numpy", "grpc", "google"} & {name.split(".")[0] for name in sys.modules})
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.splitlines()[-1] == "0 set()" and found.stderr == ""
    assert "heliograph" in found.stdout


def test_importing_loads_no_server_numba_or_rich() -> None:
    heavy = {"numba", "rich", "uvloop", "heliograph_server", "heliograph_backends", "ml_dtypes", "tokenizers"}
    code = f"import heliograph, sys; print({heavy} & {{n.split('.')[0] for n in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.stdout.strip(), found.stderr) == ("set()", "")


def test_errors_can_be_pickled(x: hg.Value) -> None:
    with pytest.raises(hg.InvalidGraphError) as caught:
        x @ x
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), copy.origin, copy.advice) == (
        hg.InvalidGraphError,
        caught.value.origin,
        caught.value.advice,
    )
