"""Models in the operator's folder: files of both formats' libraries, and hostile ones."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from content_clients import Brought, host_with
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf import quantize as gguf_quantize
from gguf_files import save, write_model
from safetensors.numpy import save_file

from heliograph_proto.digests import digest_of
from heliograph_proto.errors import (
    ConfigurationError,
    HeliographError,
    InvalidArgumentError,
    InvalidModelError,
    MissingContentError,
)
from heliograph_proto.types import DTYPES
from heliograph_server.weights.model_files import ModelFiles

SEED = 20251122


def names(models: ModelFiles) -> tuple[str, ...]:
    return tuple(one.name for one in models.files())


ELEMENTS = np.arange(24, dtype=np.float32).reshape(4, 6)


def safetensors_of(header: Any, data: bytes = b"") -> bytes:
    """A file with this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def gguf_of(tensors: int, entries: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


def text(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


@pytest.fixture
def models(tmp_path: Path) -> ModelFiles:
    (tmp_path / "models" / "deep").mkdir(parents=True)
    save_file({"w": ELEMENTS}, tmp_path / "models" / "plain.safetensors")
    return ModelFiles(tmp_path / "models")


def test_safetensors_are_listed_with_shapes_types_and_digests(models: ModelFiles) -> None:
    arrays = {
        "a": ELEMENTS,
        "b.half": ELEMENTS.astype(np.float16),
        "c": np.arange(5, dtype=np.int64),
        "flag": np.array([True, False]),
        "scalar": np.array(3.0, np.float64),
    }
    save_file(arrays, models.folder / "deep" / "all.safetensors", {"author": "nobody"})
    assert names(models) == ("deep/all.safetensors", "plain.safetensors")
    found = {one.name: one for one in models.describe("deep/all.safetensors").tensors}
    assert {name: str(one.type) for name, one in found.items()} == {
        "a": "f32[4, 6]",
        "b.half": "f16[4, 6]",
        "c": "i64[5]",
        "flag": "bool[2]",
        "scalar": "f64[]",
    }
    assert all(found[name].digest == digest_of(array.tobytes()) for name, array in arrays.items())


def test_gguf_files_are_read_as_their_own_library_reads_them(models: ModelFiles) -> None:
    path = models.folder / "model.gguf"
    writer = GGUFWriter(path, "llama")
    rng = np.random.default_rng(SEED)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(100)])
    writer.add_array("list.of.numbers", [1, 2, 3])
    for kind in ("F32", "F16", "BF16", "Q4_0", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0"):
        rows = rng.standard_normal((3, 256), np.float32)
        found = gguf_quantize(rows, GGMLQuantizationType[kind])
        writer.add_tensor(f"blk.{kind}", found, raw_dtype=GGMLQuantizationType[kind])
    save(writer)
    tensors = {one.name: one for one in models.describe("model.gguf").tensors}
    reader = GGUFReader(path)
    assert len(tensors) == len(reader.tensors) == 8
    for theirs in reader.tensors:
        ours = tensors[theirs.name]
        assert ours.type.shape == (3, 256) and ours.type.dtype.name == theirs.tensor_type.name.lower()
        assert ours.digest == digest_of(np.ascontiguousarray(theirs.data).tobytes())


def test_the_summary_of_a_model_is_bounded_and_takes_no_entry_on_trust(models: ModelFiles) -> None:
    entries = {"general.name": "x" * 5000, "llama.context_length": "long", "general.file_type": [1, 2]}
    write_model(models.folder / "m.gguf", entries=entries, chat_template=None)
    (found,) = (one.gguf for one in models.files() if one.gguf)
    assert (found.title, found.context_length) == ("x" * 200, 0)
    assert (found.architecture, found.quantization, found.tokenizer) == ("llama", "f32", "llama")
    assert found.words == 650 and not found.has_chat_template


def test_every_stored_type_of_a_gguf_file_is_read(models: ModelFiles) -> None:
    path = models.folder / "model.gguf"
    writer = GGUFWriter(path, "llama")
    # The package has another size for q8_1 than ggml, and lacks q2_0.
    apart = ("q8_1", "q2_0")
    stored = [one for one in DTYPES.values() if one.kind == "quantized" and one.name not in apart]
    for one in stored:
        type_ = GGMLQuantizationType[one.name.upper()]
        writer.add_tensor(f"blk.{one}", np.zeros((2, one.block_bytes), np.uint8), raw_dtype=type_)
    save(writer)
    found = models.describe("model.gguf")
    assert {str(one.type) for one in found.tensors} == {f"{one}[2, {one.block_size}]" for one in stored}
    assert found.left_out == ()


def test_tensors_of_unknown_types_are_left_out_by_name(models: ModelFiles) -> None:
    header = {
        "odd": entry("F8_E4M3", (4,)),
        "w": entry("F32", (1,), (4, 8)),
        "none": entry("F32", (0,), (8, 8)),
    }
    (models.folder / "odd.safetensors").write_bytes(safetensors_of(header, bytes(8)))
    found = models.describe("odd.safetensors")
    assert [one.name for one in found.tensors] == ["w"]
    assert found.left_out == ("odd: F8_E4M3 (4,)", "none: F32 (0,)")


@pytest.mark.parametrize(
    "name",
    [
        "", "/etc/passwd", "../plain.safetensors", "deep/../../plain.safetensors", "deep\\..\\x.gguf", ".",
        "a\0b.gguf", "x" * 2000 + ".gguf", "plain.txt", "..", "/plain.safetensors", "deep",
    ],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_refused(models: ModelFiles, name: str) -> None:
    with pytest.raises(InvalidArgumentError):
        models.describe(name)


def test_links_that_lead_out_of_the_folder_are_refused(models: ModelFiles, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    save_file({"secret": ELEMENTS}, outside)
    (models.folder / "link.safetensors").symlink_to(outside)
    (models.folder / "folder").symlink_to(tmp_path, target_is_directory=True)
    (models.folder / "round.safetensors").symlink_to("round.safetensors")
    for name in ("link.safetensors", "folder/outside.safetensors"):
        with pytest.raises(InvalidArgumentError, match="leads out"):
            models.describe(name)
    with pytest.raises(InvalidModelError):
        models.describe("round.safetensors")
    assert "folder/outside.safetensors" not in names(models)


def test_links_inside_the_folder_are_followed(models: ModelFiles) -> None:
    (models.folder / "deep" / "alias.safetensors").symlink_to("../plain.safetensors")
    assert models.describe("deep/alias.safetensors").tensors[0].digest == digest_of(ELEMENTS.tobytes())


def test_the_listing_has_exactly_what_can_be_described(models: ModelFiles, tmp_path: Path) -> None:
    folder = models.folder
    save_file({"w": ELEMENTS}, tmp_path / "outside.safetensors")
    (folder / "out.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (folder / "broken.gguf").symlink_to("nothing.gguf")
    (folder / "round.safetensors").symlink_to("round.safetensors")
    (folder / "blob").write_bytes((folder / "plain.safetensors").read_bytes())
    (folder / "named.safetensors").symlink_to("blob")
    (folder / "linked").symlink_to("deep", target_is_directory=True)
    (folder / "deep" / "up").symlink_to("..", target_is_directory=True)
    save_file({"w": ELEMENTS}, folder / "deep" / "inner.safetensors")
    save_file({"w": ELEMENTS}, folder / "line\nbreak.safetensors")
    save_file({"w": ELEMENTS}, folder / "back\\slash.safetensors")
    (folder / "cut.safetensors").write_bytes(b"nonsense")
    (folder / "folder.gguf").mkdir()
    os.mkfifo(folder / "pipe.gguf")
    listed = names(models)
    assert listed == (
        "deep/inner.safetensors",
        "linked/inner.safetensors",
        "named.safetensors",
        "plain.safetensors",
    )
    for name in listed:
        assert models.describe(name).tensors[0].name == "w"
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name not in listed:
            with pytest.raises(HeliographError):
                models.describe(name)


def test_a_malformed_file_is_logged_once_and_listed_once_it_is_mended(
    models: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    path = models.folder / "model.safetensors"
    path.write_bytes(b"nonsense")
    for _ in range(3):
        assert names(models) == ("plain.safetensors",)
    assert [one.getMessage() for one in caplog.records if "model.safetensors" in one.getMessage()] == [
        one for one in caplog.messages if "is not listed" in one
    ] and caplog.text.count("is not listed") == 1
    save_file({"w": ELEMENTS}, path)
    assert names(models) == ("model.safetensors", "plain.safetensors")


def test_a_file_that_is_missing_or_no_file_says_so(models: ModelFiles) -> None:
    (models.folder / "folder.gguf").mkdir()
    os.mkfifo(models.folder / "pipe.gguf")
    for name in ("none.gguf", "folder.gguf", "pipe.gguf"):
        with pytest.raises(InvalidModelError, match="has no model"):
            models.describe(name)


HOSTILE = {
    "empty.safetensors": b"",
    "short.safetensors": b"\x10\0\0",
    "long.safetensors": (2**63).to_bytes(8, "little") + b"{}",
    "past.safetensors": (1000).to_bytes(8, "little") + b"{}",
    "nojson.safetensors": safetensors_of(b"{nothing}"),
    "list.safetensors": safetensors_of(b"[1, 2]"),
    "deep.safetensors": safetensors_of(b"[" * 200_000),
    "digits.safetensors": safetensors_of(b'{"w": ' + b"9" * 10_000 + b"}"),
    "bytes.safetensors": safetensors_of(b'{"\xff": 1}'),
    "noentry.safetensors": safetensors_of({"w": 3}),
    "nooffsets.safetensors": safetensors_of({"w": {"dtype": "F32", "shape": [1]}}),
    "negative.safetensors": safetensors_of({"w": entry(offsets=(-4, 0))}, bytes(4)),
    "backwards.safetensors": safetensors_of({"w": entry(offsets=(4, 0))}, bytes(8)),
    "outside.safetensors": safetensors_of({"w": entry(offsets=(0, 4))}, bytes(3)),
    "toolong.safetensors": safetensors_of({"w": entry(offsets=(0, 8))}, bytes(8)),
    "negshape.safetensors": safetensors_of({"w": entry(shape=(-1,))}, bytes(4)),
    "bools.safetensors": safetensors_of({"w": entry(shape=(True,))}, bytes(4)),
    "huge.safetensors": safetensors_of({"w": entry(shape=(2**40, 2**40))}, bytes(4)),
    "ranks.safetensors": safetensors_of({"w": entry(shape=(1,) * 100)}, bytes(4)),
    "noname.safetensors": safetensors_of({"": entry()}, bytes(4)),
    "longname.safetensors": safetensors_of({"x" * 5000: entry()}, bytes(4)),
    "code.safetensors": safetensors_of({"w": entry(dtype=["F32"])}, bytes(4)),
    "empty.gguf": b"",
    "magic.gguf": b"NOTG" + bytes(40),
    "version.gguf": gguf_of(0, 0, version=1),
    "tensors.gguf": gguf_of(2**60, 0),
    "entries.gguf": gguf_of(0, 2**60),
    "cut.gguf": gguf_of(1, 0),
    "key.gguf": gguf_of(0, 1, (2**63).to_bytes(8, "little")),
    "kind.gguf": gguf_of(0, 1, text(b"k") + struct.pack("<I", 99)),
    "value.gguf": gguf_of(0, 1, text(b"k") + struct.pack("<IQ", 8, 2**62)),
    "endless.gguf": gguf_of(0, 1, text(b"k") + struct.pack("<IIQ", 9, 0, 2**62)),
    "texts.gguf": gguf_of(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, 2**20)),
    "lists.gguf": gguf_of(0, 1, text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50),
    "align.gguf": gguf_of(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 0)),
    "odd.gguf": gguf_of(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 33)),
    "ranks.gguf": gguf_of(1, 0, text(b"w") + struct.pack("<I", 2**31)),
    "outside.gguf": gguf_of(1, 0, text(b"w") + struct.pack("<IQIQ", 1, 100, 0, 0)),
    "offset.gguf": gguf_of(1, 0, text(b"w") + struct.pack("<IQIQ", 1, 1, 0, 2**63)),
    "huge.gguf": gguf_of(1, 0, text(b"w") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)),
    "block.gguf": gguf_of(1, 0, text(b"w") + struct.pack("<IQIQ", 1, 31, 2, 0) + bytes(100)),
    "utf8.gguf": gguf_of(1, 0, text(b"\xff\xfe") + struct.pack("<IQIQ", 1, 1, 0, 0) + bytes(100)),
    "twice.gguf": gguf_of(2, 0, (text(b"w") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2 + bytes(100)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_typed_errors(models: ModelFiles, name: str) -> None:
    (models.folder / name).write_bytes(HOSTILE[name])
    with pytest.raises(InvalidModelError, match="not a valid model"):
        models.describe(name)


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_damaged_files_are_typed_errors_or_stay_inside_of_the_file(models: ModelFiles, suffix: str) -> None:
    path = models.folder / f"m.{suffix}"
    if suffix == "safetensors":
        save_file({"a": ELEMENTS, "b": ELEMENTS[0]}, path)
    else:
        writer = GGUFWriter(path, "llama")
        writer.add_array("numbers", [1, 2, 3])
        writer.add_tensor("a", ELEMENTS)
        save(writer)
    whole = path.read_bytes()
    rng = np.random.default_rng(SEED)
    for round in range(400):
        data = bytearray(whole[: rng.integers(0, len(whole) + 1)] if rng.random() < 0.3 else whole)
        for place in rng.integers(0, max(1, len(data)), 3):
            if data:
                data[place % len(data)] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            models.describe(path.name)
        except HeliographError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {SEED}, round {round}: {error!r}") from error


def test_a_session_uses_a_tensor_of_a_file_without_bringing_it(models: ModelFiles) -> None:
    data = ELEMENTS.tobytes()
    with host_with(models=models) as host:
        client = Brought(host, b"")
        with pytest.raises(MissingContentError):
            client.compile(data)
        client.session.describe_model("plain.safetensors")
        assert not client.is_missing(data)
        client.compile(data)


@pytest.mark.parametrize("change", ["written", "cut", "gone"])
def test_a_file_that_changed_after_it_was_listed_is_a_typed_error(models: ModelFiles, change: str) -> None:
    path = models.folder / "plain.safetensors"
    changes: dict[str, Callable[[], object]] = {
        "written": lambda: save_file({"w": ELEMENTS + 1}, path),
        "cut": lambda: os.truncate(path, path.stat().st_size - 4),
        "gone": path.unlink,
    }
    with host_with(models=models) as host:
        client = Brought(host)
        client.session.describe_model(path.name)
        changes[change]()
        with pytest.raises(InvalidModelError):
            client.compile(ELEMENTS.tobytes())
        if change == "written":
            client.session.describe_model(path.name)
            client.compile((ELEMENTS + 1).tobytes())


def test_a_server_without_a_folder_has_no_models() -> None:
    with host_with() as host:
        session = Brought(host).session
        assert session.models() == ()
        with pytest.raises(InvalidModelError, match="has no model"):
            session.describe_model("plain.safetensors")


def test_a_folder_that_is_missing_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the models"):
        ModelFiles(tmp_path / "none")


# Models in several files


def test_a_split_model_is_listed_once_and_described_from_any_part(models: ModelFiles) -> None:
    whole = write_model(models.folder / "whole.gguf", "llama", "q8_0")
    first = write_model(models.folder / "deep" / "m.gguf", "llama", "q8_0", part_tensors=8)
    parts = sorted(first.parent.glob("m-*"))
    assert names(models) == (f"deep/{first.name}", "plain.safetensors", "whole.gguf")
    listed = {one.name: one for one in models.files()}
    assert listed[f"deep/{first.name}"].size_bytes == sum(part.stat().st_size for part in parts)
    assert listed[f"deep/{first.name}"].gguf == listed["whole.gguf"].gguf
    expected = {one.name: one.digest for one in models.describe(whole.name).tensors}
    for part in parts:
        found = models.describe(f"deep/{part.name}")
        assert found.name == f"deep/{first.name}"
        assert {one.name: one.digest for one in found.tensors} == expected
        assert [one.name for one in found.parts] == [f"deep/{one.name}" for one in parts]
    for digest in expected.values():
        source = models.open(digest)
        assert source is not None
        data = bytearray(source.size_bytes)
        assert source.read_into(0, memoryview(data)) == len(data) and digest_of(bytes(data)) == digest
        source.close()


def test_a_split_model_without_a_part_is_not_listed_until_it_is_there(models: ModelFiles) -> None:
    first = write_model(models.folder / "m.gguf", "llama", part_tensors=8)
    second = sorted(models.folder.glob("m-*"))[1]
    data = second.read_bytes()
    assert names(models) == (first.name, "plain.safetensors")
    second.unlink()
    assert names(models) == ("plain.safetensors",)
    with pytest.raises(InvalidModelError, match=f"the server has no model '{second.name}'"):
        models.describe(first.name)
    second.write_bytes(data)
    assert names(models) == (first.name, "plain.safetensors")
    assert models.describe(second.name).name == first.name


def test_a_part_that_changed_is_read_again(models: ModelFiles) -> None:
    first = write_model(models.folder / "m.gguf", "llama", "f32", part_tensors=8)
    before = {one.name: one.digest for one in models.describe(first.name).tensors}
    last = sorted(models.folder.glob("m-*"))[-1]
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    after = {one.name: one.digest for one in models.describe(first.name).tensors}
    assert sum(after[name] != before[name] for name in before) == 1
