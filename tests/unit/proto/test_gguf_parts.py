"""Models that are split into several GGUF files, as ggml's own library writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_files import save, write_model

import heliograph as hg
from heliograph.llm.files.weights import open_file
from heliograph_proto.gguf import PartName, part_name

TENSORS = 8


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_model(tmp_path / "whole.gguf", "llama", "q8_0")


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", "llama", "q8_0", part_tensors=TENSORS)


def parts(first: Path) -> list[Path]:
    return sorted(first.parent.glob("m-*.gguf"))


def test_any_part_leads_to_all_tensors_and_the_first_ones_entries(whole: Path, first: Path) -> None:
    expected = hg.llm.read_header(whole)
    assert len(parts(first)) > 3
    for part in parts(first):
        found = hg.llm.read_header(part)
        assert found.name == first.name and found.architecture == "llama"
        assert found.metadata["llama.block_count"] == expected.metadata["llama.block_count"]
        assert {one.name: (one.type_name, one.shape) for one in found.tensors} == {
            one.name: (one.type_name, one.shape) for one in expected.tensors
        }
        assert (found.parameters, found.quantization) == (expected.parameters, expected.quantization)


def test_the_tensors_of_all_parts_have_the_bytes_of_one_file(whole: Path, first: Path) -> None:
    graphs = []
    for path in (whole, first):
        found, graph = open_file(path), hg.Graph()
        for name in sorted(found.weights.shapes):
            found.weights.add(graph, name)
        graphs.append(graph._freeze(range(len(graph._leaves))))
    assert [leaf.digest for leaf in graphs[0].leaves] == [leaf.digest for leaf in graphs[1].leaves]


def cut_a_part(first: Path) -> None:
    parts(first)[2].unlink()


def put_one_twice(first: Path) -> None:
    second, third = parts(first)[1:3]
    data = second.read_bytes()
    at = data.index(b"split.no") + len(b"split.no") + 4
    third.write_bytes(data[:at] + (2).to_bytes(2, "little") + data[at + 2 :])


def rename(first: Path) -> None:
    second = parts(first)[1]
    second.rename(second.with_name(first.name))


def take_another(first: Path) -> None:
    second = parts(first)[1]
    write_model(first.parent / "other.gguf", "llama", "f16", part_tensors=4 * TENSORS).rename(second)


def leave_one_out(first: Path) -> None:
    """The last part of a model with fewer tensors."""
    last = parts(first)[-1]
    writer = GGUFWriter(last, "llama")
    writer.add_uint16("split.no", len(parts(first)) - 1)
    writer.add_uint16("split.count", len(parts(first)))
    writer.add_tensor("other", np.ones(3, np.float32))
    save(writer)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (cut_a_part, r"cannot read .*m-00003-of-0000\d.gguf: No such file"),
        (put_one_twice, r"m-00003-of-0000\d.gguf has tensor '.*' of m-00002-of-0000\d.gguf again"),
        (rename, r"m-00001-of-0000\d.gguf says that it is part 2 of \d, and is not named so"),
        (take_another, r"m-00002-of-0000\d.gguf says that it is part 1 of 2, and is not named so"),
        (leave_one_out, r"is of a model with \d+ tensors, and its \d parts have \d+"),
    ],
)
def test_parts_that_are_not_of_one_model_are_named(
    first: Path, break_it: Callable[[Path], None], message: str
) -> None:
    break_it(first)
    with pytest.raises(hg.InvalidModelError, match=message):
        hg.llm.read_header(first)


def test_a_missing_part_is_told_of_from_every_other_one(first: Path) -> None:
    first.unlink()
    with pytest.raises(hg.InvalidModelError, match="m-00001-of") as caught:
        hg.llm.read_header(parts(first)[0])
    assert "all parts lie in one folder" in caught.value.advice


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("m-00001-of-00003.gguf", PartName("m", 0, 3)),
        ("a/b-00003-of-00003.gguf", PartName("a/b", 2, 3)),
        ("m-00000-of-00003.gguf", None),
        ("m-00004-of-00003.gguf", None),
        ("m-1-of-3.gguf", None),
        ("m-00001-of-00003.safetensors", None),
        ("m.gguf", None),
    ],
)
def test_names_of_parts(name: str, found: PartName | None) -> None:
    assert part_name(name) == found
    if found is not None:
        assert found.of(found.number) == name
