"""Graphs in files: what comes back, what the files are, and what is refused."""

from __future__ import annotations

import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heliograph as hg
from heliograph.graph.frozen import thaw
from heliograph_proto import graph as contract
from heliograph_proto.digests import digest_of
from heliograph_proto.graph import Leaf, LeafKind, Output
from heliograph_proto.types import DTYPES, DType, TensorType

SEED = 20251121
SHAPE = (4, 3)


def model() -> hg.Graph:
    """Two layers that share a content, with a constant, a variable and scopes."""
    g = hg.Graph()
    x = g.input("x", SHAPE, "f32")
    w = np.random.default_rng(SEED).standard_normal((3, 3)).astype(np.float32)
    for number in range(2):
        with g.scope(f"layer{number}"):
            x = hg.tanh(x @ g.weight("w", w.copy()) + np.array([1, 2, 3], np.float32))
            state = g.variable("state", SHAPE, "f32")
            x = hg.assign(state, x + state)
    g.output("y", x)
    return g


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.hgraph"


@pytest.fixture
def saved(path: Path) -> Path:
    """A model in a file."""
    hg.save(model(), path)
    return path


def weights(path: Path) -> Path:
    return path.with_suffix(".safetensors")


def run(session: hg.Session, graph: hg.Graph) -> Any:
    return session.compile(graph).run(x=np.ones(SHAPE, np.float32))["y"]


# What comes back


def test_a_graph_comes_back_as_it_was(saved: Path) -> None:
    assert hg.load(saved)._freeze() == model()._freeze()
    with hg.connect("local:") as one, hg.connect("local:") as other:
        np.testing.assert_array_equal(run(one, hg.load(saved)), run(other, model()))


def test_the_same_graph_gives_the_same_bytes_also_once_loaded(saved: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.hgraph"
    for graph in (model(), hg.load(saved)):
        hg.save(graph, again)
        assert again.read_bytes() == saved.read_bytes()
        assert weights(again).read_bytes() == weights(saved).read_bytes()


def test_names_and_scopes_are_kept(saved: Path) -> None:
    graph = hg.load(saved)
    assert list(graph.inputs) == ["x"] and list(graph.outputs) == ["y"]
    assert list(graph.variables) == ["layer0/state", "layer1/state"]
    assert [value.name for value in graph.find("layer1/*w")] == ["layer1/w"]
    assert [value.op for value in graph.find("layer0/tanh*")] == ["tanh"]


def test_a_loaded_graph_can_be_extended_and_saved_again(saved: Path) -> None:
    graph = hg.load(saved)
    extra = graph.weight("extra", np.full(SHAPE, 3, np.float32))
    graph.output("z", graph.outputs["y"] * extra)
    hg.save(graph, saved)
    with hg.connect("local:") as session:
        outputs = session.compile(hg.load(saved)).run(x=np.ones(SHAPE, np.float32))
    np.testing.assert_array_equal(outputs["z"], outputs["y"] * 3)


def test_names_of_a_loaded_graph_are_taken(saved: Path) -> None:
    graph = hg.load(saved)
    with pytest.raises(hg.InvalidGraphError, match="two inputs are named 'x'"):
        graph.input("x", SHAPE, "f32")
    with pytest.raises(hg.InvalidGraphError, match="two outputs are named 'y'"):
        graph.output("y", graph.inputs["x"])


def test_a_graph_without_weights_is_one_file(path: Path) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", (2,), "f32") * 2)
    hg.save(g, path)
    assert os.listdir(path.parent) == [path.name]
    assert hg.load(path)._freeze() == g._freeze()


def leaves_only(leaf: Leaf, content: np.ndarray[Any, Any]) -> hg.Graph:
    frozen = contract.Graph((leaf,), (), (Output("y", 0),))
    return thaw(frozen, {leaf.digest: content})


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_weights_of_every_type_come_back_byte_by_byte(dtype: DType, path: Path) -> None:
    type_ = TensorType(dtype, (2, 3, 2 * dtype.block_size))
    content = np.random.default_rng(SEED).integers(0, 2, type_.nbytes, np.uint8)
    array = content.view(dtype.storage).reshape(type_.storage_shape)
    leaf = Leaf(LeafKind.WEIGHT, "w", type_, digest_of(content.tobytes()))
    hg.save(leaves_only(leaf, array), path)
    found = hg.load(path)
    assert found.outputs["y"].type == type_
    assert [one.tobytes() for one in found._contents().values()] == [content.tobytes()]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_weights_come_back(shape: tuple[int, ...], path: Path) -> None:
    g = hg.Graph()
    g.output("y", g.weight("w", np.ones(shape, np.float64)))
    g.output("z", g.weight("v", np.ones((5,), np.int8)))
    hg.save(g, path)
    assert hg.load(path)._freeze() == g._freeze()


def test_bound_weights_have_no_contents_and_stay_bound(path: Path) -> None:
    g = hg.Graph()
    g.output("y", g.input("x", (3,), "f32") * g.bound_weight("w", (3,), "f32"))
    hg.save(g, path)
    assert os.listdir(path.parent) == [path.name]
    with hg.connect("local:") as session:
        w = session.put(np.array([1, 2, 3], np.float32))
        session.synchronize(10)
        plan = session.compile(hg.load(path), weights={"w": w})
        np.testing.assert_array_equal(plan.run(x=np.full(3, 2, np.float32))["y"], [2, 4, 6])


# What the files are


def test_other_programs_read_the_weights_and_each_content_is_there_once(saved: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    found = safetensors.load_file(weights(saved))
    names = [leaf.name for leaf in model()._freeze().weights]
    assert "layer0/w" in found and "layer1/w" in names and "layer1/w" not in found
    np.testing.assert_array_equal(found["layer0/w"], hg.load(saved)._contents()[digest(found["layer0/w"])])


def digest(array: np.ndarray[Any, Any]) -> bytes:
    return digest_of(array.tobytes())


def test_blocks_are_rows_of_bytes_whose_type_is_in_the_metadata(path: Path) -> None:
    from safetensors import safe_open

    type_ = TensorType(DTYPES["q4_0"], (2, 64))
    array = np.zeros(type_.storage_shape, np.uint8)
    hg.save(leaves_only(Leaf(LeafKind.WEIGHT, "w", type_, digest(array)), array), path)
    with safe_open(weights(path), framework="numpy") as file:
        assert file.get_slice("w").get_dtype() == "U8" and file.get_slice("w").get_shape() == [2, 36]
        assert file.metadata() == {"heliograph": '{"format": 1, "types": {"w": "q4_0[2, 64]"}}'}


def test_neither_saving_nor_loading_copies_a_weight(path: Path) -> None:
    size = 16 * 2**20
    g = hg.Graph()
    g.output("y", g.weight("w", np.ones(size // 4, np.float32)))
    tracemalloc.start()
    try:
        hg.save(g, path)
        found = hg.load(path)
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()
    assert next(iter(found._contents().values())).nbytes == size


def test_weights_may_lie_elsewhere(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    other = weights(saved).rename(tmp_path / "elsewhere" / "any.safetensors")
    with pytest.raises(hg.InvalidModelError, match="the weights are missing"):
        hg.load(saved)
    assert hg.load(saved, weights=other)._freeze() == model()._freeze()


def test_the_file_that_a_graph_was_loaded_from_can_be_saved_over(saved: Path) -> None:
    graph = hg.load(saved)
    before = saved.read_bytes()
    hg.save(graph, saved)
    assert saved.read_bytes() == before and hg.load(saved)._freeze() == graph._freeze()
    assert run_of(graph) == run_of(hg.load(saved))


def run_of(graph: hg.Graph) -> bytes:
    with hg.connect("local:") as session:
        found: bytes = run(session, graph).tobytes()
        return found


def test_names_are_never_paths(path: Path, tmp_path: Path) -> None:
    g = hg.Graph()
    g.output("../../y", g.weight("../../w", np.ones(3, np.float32)))
    hg.save(g, path)
    assert hg.load(path)._freeze() == g._freeze()
    assert sorted(os.listdir(tmp_path)) == ["model.hgraph", "model.safetensors"]


# What is not written


def test_a_file_stays_as_it_was_when_saving_fails(saved: Path) -> None:
    before = {name: (saved.parent / name).read_bytes() for name in os.listdir(saved.parent)}
    unfinished = hg.Graph()
    unfinished.weight("w", np.ones(3, np.float32))
    with pytest.raises(hg.InvalidGraphError, match="no outputs"):
        hg.save(unfinished, saved)
    assert {name: (saved.parent / name).read_bytes() for name in os.listdir(saved.parent)} == before


def test_what_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken.hgraph").mkdir()
    for name in ("missing/model.hgraph", "taken.hgraph", "model.safetensors"):
        with pytest.raises(hg.InvalidArgumentError) as caught:
            hg.save(model(), tmp_path / name)
        assert caught.value.advice
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_weights_of_somebody_else_are_not_replaced(path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"w": np.ones(3, np.float32)}, weights(path))
    before = weights(path).read_bytes()
    for content in (before, b"something else"):
        weights(path).write_bytes(content)
        with pytest.raises(hg.InvalidArgumentError, match=r"hg\.save did not write it"):
            hg.save(model(), path)
        assert weights(path).read_bytes() == content and not path.exists()


def test_without_safetensors_it_says_what_to_install(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for step in (lambda: hg.load(saved), lambda: hg.save(model(), saved)):
        with pytest.raises(hg.ConfigurationError, match="safetensors") as caught:
            step()
        assert caught.value.advice == "pip install 'heliograph[models]'"


def test_a_name_that_the_format_keeps_is_refused(path: Path) -> None:
    g = hg.Graph()
    g.output("y", g.weight("__metadata__", np.ones(3, np.float32)))
    with pytest.raises(hg.InvalidArgumentError, match="keeps for itself"):
        hg.save(g, path)
