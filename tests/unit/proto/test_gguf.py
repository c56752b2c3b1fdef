"""Headers of GGUF files: as ggml's own library reads them, and what strangers may send."""

from __future__ import annotations

import io
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf_files import SHAPES, save, write_model
from hostile_gguf import HOSTILE, LIST, TEXT, U32, N, entry, file_of, tensor, text, words

from heliograph_proto.errors import InvalidModelError
from heliograph_proto.gguf import (
    MAX_HEADER_BYTES,
    MAX_ITEMS,
    GgufHeader,
    Words,
    parse_header,
    read_header,
)

SEED = 20261123


def read(data: bytes) -> GgufHeader:
    return read_header(io.BytesIO(data), "m.gguf")


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("stored", ["f32", "f16", "q4_0", "q8_0"])
def test_headers_are_read_as_ggmls_own_library_reads_them(
    tmp_path: Path, architecture: str, stored: str
) -> None:
    path = write_model(tmp_path / "m.gguf", architecture, stored)
    theirs = GGUFReader(path)
    with path.open("rb") as file:
        ours = read_header(file, path.name)
    expected = {key: one.contents() for key, one in theirs.fields.items() if not key.startswith("GGUF.")}
    found = {
        key: value if isinstance(value, (bool, int, float, str)) else list(value)
        for key, value in ours.metadata.items()
    }
    assert found == expected
    assert ours.architecture == architecture and ours.quantization == stored
    assert [
        (one.name, one.type_name, one.shape, one.offset_bytes, one.nbytes) for one in ours.tensors
    ] == [
        (
            one.name,
            one.tensor_type.name.lower(),
            tuple(int(count) for count in reversed(one.shape)),
            one.data_offset,
            one.n_bytes,
        )
        for one in theirs.tensors
    ]  # fmt: skip
    assert ours.parameters == sum(int(one.n_elements) for one in theirs.tensors)


def test_every_kind_of_value_has_its_own_type(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    scalars: dict[str, Any] = {
        "uint8": 200, "int8": -5, "uint16": 60_000, "int16": -7, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": math.pi, "bool": True,
        "string": "ä 漢",
    }  # fmt: skip
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    writer.add_array("words", ["a", "", "ß"])
    writer.add_array("lists", [[1, 2], [3]])
    save(writer)
    found = read((tmp_path / "m.gguf").read_bytes())
    for kind, value in scalars.items():
        assert found.metadata[kind] == value and type(found.metadata[kind]) is type(value)
    assert found.numbers("numbers").tolist() == [1, -2, 3]
    assert found.numbers("flags").tolist() == [
        True,
        False,
    ]
    assert list(found.words("words")) == ["a", "", "ß"] and found.words("words")[1:] == ("", "ß")
    assert [list(one) for one in found.metadata["lists"]] == [[1, 2], [3]]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="read-only"):
        found.numbers("numbers")[0] = 1


def test_entries_are_asked_for_by_kind() -> None:
    found = read(file_of([entry(b"n", U32, struct.pack("<I", 3)), entry(b"t", TEXT, text(b"x"))]))
    assert found.value("n", int) == 3 and found.value("n", float) == 3.0 and found.value("none", int, 7) == 7
    with pytest.raises(InvalidModelError, match="m.gguf has no entry 'none'"):
        found.value("none", str)
    with pytest.raises(InvalidModelError, match="entry 't' is str 'x', not int"):
        found.value("t", int)
    with pytest.raises(InvalidModelError, match="entry 'n' is int 3, not a list of texts"):
        found.words("n")
    with pytest.raises(InvalidModelError, match="entry 'none' is missing"):
        found.numbers("none")


def test_a_header_longer_than_the_first_read_is_read_once_more() -> None:
    many = [b"word %d" % number for number in range(100_000)]
    found = read(file_of([entry(b"words", LIST, words(*many)), entry(b"n", U32, bytes(4))]))
    assert isinstance(found.metadata["words"], Words) and len(found.words("words")) == 100_000
    assert found.words("words")[-1] == "word 99999" and found.metadata["n"] == 0


def test_a_header_apart_from_its_file_is_the_same(tmp_path: Path) -> None:
    data = write_model(tmp_path / "m.gguf").read_bytes()
    whole = read(data)
    apart = parse_header(data[: whole.data_offset], len(data), "m.gguf")
    assert apart.tensors == whole.tensors and list(apart.metadata) == list(whole.metadata)
    with pytest.raises(InvalidModelError, match="goes on behind byte 1000"):
        parse_header(data[:1000], len(data), "m.gguf")


def test_an_unknown_type_is_kept_by_its_number_and_has_no_size() -> None:
    tensors = [tensor(b"odd", (4,), 77), tensor(b"w", (1,), 0, 32), tensor(b"q", (256,), 16, 64)]
    tensors += [tensor(b"signs", (256,), 41, 160), tensor(b"two", (256,), 42, 224)]
    odd, known, stored, signs, two = read(file_of(tensors=tensors, data=bytes(320))).tensors
    assert (odd.type_name, odd.nbytes, odd.type) == ("ggml type 77", None, None)
    assert (str(known.type), known.nbytes) == ("f32[1]", 4)
    assert (stored.type_name, stored.nbytes, str(stored.type)) == ("iq2_xxs", 66, "iq2_xxs[256]")
    assert (signs.type_name, signs.nbytes, str(signs.type)) == ("q1_0", 36, "q1_0[256]")
    assert (two.type_name, two.nbytes, str(two.type)) == ("q2_0", 72, "q2_0[256]")


@pytest.mark.parametrize("reason", HOSTILE)
def test_a_hostile_header_is_refused_with_its_place(reason: str) -> None:
    with pytest.raises(InvalidModelError) as caught:
        read(HOSTILE[reason])
    assert reason in caught.value.message and "m.gguf is not a valid model" in caught.value.message


def test_a_word_that_is_not_utf8_is_named_when_the_words_are_asked_for() -> None:
    found = read(file_of([entry(b"list", LIST, words(b"good", b"\xff"))])).words("list")
    assert len(found) == 2
    with pytest.raises(InvalidModelError, match="m.gguf, entry 'list': word 1 is not UTF-8"):
        list(found)


def test_lists_of_many_empty_words_are_bounded_over_the_whole_file() -> None:
    one = struct.pack("<IQ", TEXT, MAX_ITEMS // 2 + 1) + bytes(8 * (MAX_ITEMS // 2 + 1))
    with pytest.raises(InvalidModelError, match="values; at most"):
        read(file_of([entry(b"a", LIST, one), entry(b"b", LIST, one)]))


def test_a_header_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    with path.open("wb") as file:
        file.write(file_of([entry(b"n", TEXT, struct.pack("<Q", MAX_HEADER_BYTES)), N]))
        file.truncate(MAX_HEADER_BYTES + 1000)
    with path.open("rb") as file, pytest.raises(InvalidModelError, match="longest header"):
        read_header(file, "long.gguf")


@pytest.mark.parametrize("part", range(4))
def test_a_mutated_header_is_a_typed_error_or_stays_inside_of_the_file(tmp_path: Path, part: int) -> None:
    """Bytes, lengths and counts that are changed anywhere in the header; 10,000 in all."""
    rng = np.random.default_rng((SEED, part))
    small = file_of(
        [N, entry(b"words", LIST, words(b"a", b"bc", b"")), entry(b"t", TEXT, text(b"abc"))]
        + [entry(b"deep", LIST, struct.pack("<IQ", LIST, 1) + struct.pack("<IQ", U32, 2) + bytes(8))],
        [tensor(b"w", (4, 2)), tensor(b"q", (32,), 2, 32)],
        bytes(64),
    )
    model = write_model(tmp_path / "m.gguf", stored="q4_0").read_bytes()
    for number in range(2500):
        whole = small if number % 5 else model
        data = bytearray(whole)
        end = min(len(data), 400) if number % 2 else len(data)
        for place in rng.integers(0, end, rng.integers(1, 4)).tolist():
            match rng.integers(0, 4):
                case 0:
                    data[place : place + 1] = bytes([rng.integers(0, 256)])
                case 1:
                    data[place : place + 8] = int(rng.integers(0, 2**63)).to_bytes(8, "little")
                case 2:
                    data[place : place + 4] = b"\xff" * 4
                case _:
                    del data[place : place + int(rng.integers(1, 40))]
        if rng.random() < 0.2:
            del data[rng.integers(0, len(data) + 1) :]
        try:
            found = read(bytes(data))
            for value in found.metadata.values():
                list(value) if isinstance(value, Words) else repr(value)
        except InvalidModelError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {SEED}, part {part}, round {number}: {error!r}") from error
        for one in found.tensors:
            assert one.offset_bytes + (one.nbytes or 0) <= len(data), f"seed {SEED}, round {number}"
