"""Graph files are input from outside: what is damaged, hostile or of something else is refused, in words."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heliograph as hg
from heliograph_proto import graph as contract
from heliograph_proto.codec import encode_graph
from heliograph_proto.codec.files import MAX_FILE_BYTES
from heliograph_proto.graph import Leaf, LeafKind, Node, Output
from heliograph_proto.types import F32, TensorType
from heliograph_proto.v1 import file_pb2

SEED = 20251121


def model() -> hg.Graph:
    """Two weights of one content, a constant and a variable."""
    g = hg.Graph()
    x = g.input("x", (4, 3), "f32")
    w = np.random.default_rng(SEED).standard_normal((3, 3)).astype(np.float32)
    for number in range(2):
        with g.scope(f"layer{number}"):
            x = hg.tanh(x @ g.weight("w", w.copy()) + np.array([1, 2, 3], np.float32))
    g.output("y", hg.assign(g.variable("state", (4, 3), "f32"), x))
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


def refused(path: Path) -> hg.HeliographError:
    """Loading ends in a typed error that says what to do."""
    with pytest.raises(hg.HeliographError) as caught:
        hg.load(path)
    assert not isinstance(caught.value, hg.InternalError) and caught.value.advice
    assert path.stem in caught.value.message
    return caught.value


def test_a_part_of_a_file_is_refused(saved: Path) -> None:
    for file in (saved, weights(saved)):
        whole = file.read_bytes()
        for size in {*range(0, len(whole), 7), len(whole) - 1}:
            file.write_bytes(whole[:size])
            refused(saved)
        file.write_bytes(whole)


def test_a_damaged_file_is_refused_or_the_damage_is_without_effect(saved: Path) -> None:
    """Any byte of either file is changed; who wrote it is the one thing that may."""
    random = np.random.default_rng(SEED)
    expected = model()._freeze()
    for file in (saved, weights(saved)):
        whole = bytearray(file.read_bytes())
        for place in range(len(whole)):
            kept, whole[place] = whole[place], whole[place] ^ int(random.integers(1, 256))
            file.write_bytes(whole)
            try:
                assert hg.load(saved)._freeze() == expected, f"seed {SEED}: byte {place} of {file.name}"
            except hg.HeliographError as error:
                assert not isinstance(error, hg.InternalError)
            whole[place] = kept
        file.write_bytes(whole)


def test_bytes_that_are_no_graph_are_refused(path: Path) -> None:
    random = np.random.default_rng(SEED)
    for content in (b"", b"\0", b"not a graph", random.bytes(1000), struct.pack("<Q", 2**63)):
        path.write_bytes(content)
        assert isinstance(refused(path), hg.InvalidModelError)


def test_what_is_no_plain_file_is_refused(path: Path) -> None:
    refused(path)
    path.mkdir()
    refused(path)
    if hasattr(os, "mkfifo"):
        pipe = path.with_name("model_pipe.hgraph")
        os.mkfifo(pipe)
        refused(pipe)


def test_weights_of_another_model_are_refused(saved: Path, tmp_path: Path) -> None:
    g = hg.Graph()
    g.output("y", g.weight("layer0/w", np.ones((3, 3), np.float32)))
    hg.save(g, tmp_path / "other.hgraph")
    weights(tmp_path / "other.hgraph").replace(weights(saved))
    assert "other contents" in refused(saved).message


def test_weights_of_another_type_or_name_are_refused(saved: Path, tmp_path: Path) -> None:
    for name, array in (("layer0/w", np.ones((9,), np.float32)), ("v", np.ones((3, 3), np.float32))):
        g = hg.Graph()
        g.output("y", g.weight(name, array))
        hg.save(g, tmp_path / "other.hgraph")
        weights(tmp_path / "other.hgraph").replace(weights(saved))
        assert isinstance(refused(saved), hg.InvalidModelError)


def test_a_newer_format_is_refused_with_advice(saved: Path) -> None:
    message = file_pb2.GraphFile.FromString(saved.read_bytes())
    message.version = 2
    saved.write_bytes(message.SerializeToString())
    assert "update" in refused(saved).advice


def test_a_file_that_is_too_large_is_refused_before_it_is_read(saved: Path) -> None:
    with saved.open("ab") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert isinstance(refused(saved), hg.LimitExceededError)


X = Leaf(LeafKind.INPUT, "x", TensorType(F32, (2,)))
HUGE = replace(X, type=TensorType(F32, (2**62, 2**62)))
WRONG = Leaf(LeafKind.WEIGHT, "w", X.type, b"1")
Y = Output("y", 1)


def node(*operands: int, op: str = "neg", **fields: Any) -> Node:
    return replace(Node(op, operands, TensorType(F32, (2,)), {}, "n"), **fields)


HOSTILE: dict[str, contract.Graph] = {
    "a cycle": contract.Graph((X,), (node(2), node(1)), (Y,)),
    "itself as operand": contract.Graph((X,), (node(1),), (Y,)),
    "an operand that is not there": contract.Graph((X,), (node(2**32 - 1),), (Y,)),
    "an output that is not there": contract.Graph((X,), (), (Output("y", 7),)),
    "two outputs of one name": contract.Graph((X,), (node(0),), (Y, Y)),
    "two inputs of one name": contract.Graph((X, X), (node(0),), (Y,)),
    "a huge shape": contract.Graph((HUGE,), (), (Output("y", 0),)),
    "a negative shape": contract.Graph((replace(X, type=TensorType(F32, (-1,))),), (), (Output("y", 0),)),
    "another type than inferred": contract.Graph((X,), (node(0, type=TensorType(F32, (3,))),), (Y,)),
    "an op that is not there": contract.Graph((X,), (node(0, op="os.system"),), (Y,)),
    "an attribute that is not there": contract.Graph((X,), (node(0, attributes={"code": 1}),), (Y,)),
    "a digest that is none": contract.Graph((WRONG,), (), (Output("y", 0),)),
    "a name with a newline": contract.Graph((X,), (node(0, name="a\nb"),), (Y,)),
    "no outputs": contract.Graph((X,), (), ()),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_graph_is_refused(what: str, path: Path) -> None:
    content = encode_graph(HOSTILE[what]).SerializeToString()
    write_file(path, content)
    refused(path)


def test_a_graph_of_countless_parts_is_refused_before_anything_is_made_of_it(path: Path) -> None:
    message = encode_graph(contract.Graph((X,), (node(0),), (Y,)))
    message.nodes[0].operands.extend([0] * 20_000_000)
    write_file(path, message.SerializeToString())
    assert isinstance(refused(path), hg.LimitExceededError)


def write_file(path: Path, content: bytes) -> None:
    made = file_pb2.GraphFile(
        magic="heliograph graph", version=1, graph=content, digest=hashlib.sha256(content).digest()
    )
    path.write_bytes(made.SerializeToString())


@pytest.mark.parametrize(
    "entry",
    [
        lambda header: header.replace(b'"F32"', b'"F64"'),
        lambda header: header.replace(b'"F32"', b'"F99"'),
        lambda header: header.replace(b"[3,3]", b"[9,9]"),
        lambda header: header.replace(b'"layer0/w"', b'"layer0/v"'),
        lambda header: header.replace(b'"shape"', b'"shapf"'),
        lambda header: header.replace(b"{", b"["),
        lambda header: b" " * len(header),
    ],
)
def test_a_hostile_header_of_weights_is_refused(entry: Callable[[bytes], bytes], saved: Path) -> None:
    whole = weights(saved).read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    weights(saved).write_bytes(whole[:8] + entry(whole[8:end]) + whole[end:])
    assert isinstance(refused(saved), hg.InvalidModelError)
