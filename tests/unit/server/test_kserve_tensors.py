"""Elements of requests as arrays, the settings of models, and the parameters of requests."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heliograph_proto.errors import (
    InvalidArgumentError,
    InvalidInputError,
    InvalidModelError,
    LimitExceededError,
    UnavailableError,
    UnsupportedError,
)
from heliograph_server.gateways.kserve import tensors
from heliograph_server.gateways.kserve.repository import ModelSettings, Repository, settings_of
from heliograph_server.gateways.kserve.requests import RegionPart, options_of, region_of
from heliograph_server.gateways.kserve.tensors import DATATYPES, TensorPort


@pytest.mark.parametrize("datatype", DATATYPES)
def test_bytes_of_each_data_type_are_arrays_and_bytes_again(datatype: str) -> None:
    port = TensorPort("x", datatype, (tensors.ANY, 3))
    data = np.array([[0, 1, 1], [1, 0, 1]], tensors.numpy_of(datatype)).tobytes()
    found = tensors.from_bytes(port, tensors.check_port(port, datatype, (2, 3)), data)
    assert tensors.datatype_of_array(found) == datatype
    assert tensors.to_bytes(found) == data
    elements = [0, 1, 1, 1, 0, 1]
    assert tensors.to_bytes(tensors.from_elements(port, (2, 3), elements)) == data
    if datatype in tensors.CONTENTS:
        assert tensors.to_bytes(tensors.from_contents(port, (2, 3), elements)) == data


def test_integers_on_both_sides_of_two_to_the_63_are_exact() -> None:
    port, elements = TensorPort("x", "UINT64", (2,)), [1, 2**63 + 1]
    for read in (tensors.from_elements, tensors.from_contents):
        assert read(port, (2,), elements).tolist() == elements
    for bad in ([-1, 2**63], [1.5, 2**63]):
        with pytest.raises(InvalidInputError, match="are not of UINT64"):
            tensors.from_elements(port, (2,), bad)


def test_a_shape_of_a_million_sizes_and_a_value_of_as_many_elements_are_refused_at_once() -> None:
    many = [1] * 2**22
    began = time.thread_time()
    with pytest.raises(InvalidInputError, match="the shape of 4,194,304 sizes is given"):
        tensors.check_port(TensorPort("x", "FP32", (tensors.ANY,)), "FP32", many)
    for name in ("sequence_id", "priority", "timeout"):
        with pytest.raises(InvalidInputError, match=name):
            options_of({name: many})
    assert time.thread_time() - began < 0.02


BAD_ELEMENTS: dict[str, tuple[str, list[Any]]] = {
    "fractions of an integer": ("INT32", [1.5, 2.0]),
    "numbers beyond the type": ("INT8", [1, 200]),
    "negative numbers of an unsigned one": ("UINT8", [1, -1]),
    "integers beyond 64 bits": ("UINT64", [1, 2**64]),
    "numbers of a truth value": ("BOOL", [0, 2]),
    "texts": ("FP32", ["a", "b"]),
    "nothing": ("FP32", [None, 1.0]),
    "ragged lists": ("FP32", [[1.0], [2.0, 3.0]]),
    "too many": ("FP32", [1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("case", BAD_ELEMENTS)
def test_elements_that_a_data_type_does_not_have_are_refused(case: str) -> None:
    datatype, elements = BAD_ELEMENTS[case]
    with pytest.raises(InvalidInputError, match="input 'x'"):
        tensors.from_elements(TensorPort("x", datatype, (2,)), (2,), elements)


def test_bytes_of_another_size_or_value_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="has 8 bytes, and 7 are given"):
        tensors.from_bytes(TensorPort("x", "FP32", (2,)), (2,), bytes(7))
    with pytest.raises(InvalidInputError, match="neither 0 nor 1"):
        tensors.from_bytes(TensorPort("x", "BOOL", (2,)), (2,), b"\x01\x02")
    assert tensors.from_bytes(TensorPort("x", "FP32", (-1,)), (0,), b"").shape == (0,)


@pytest.mark.parametrize("shape", [(2**40, 2**40), (0, 2**62), (0, 2**31, 2**31), (2, 10**100)], ids=str)
def test_a_shape_that_no_array_has_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LimitExceededError, match="more than 2,147,483,648 elements"):
        tensors.check_port(TensorPort("x", "FP32", (tensors.ANY,) * len(shape)), "FP32", shape)


def test_parameters_are_checked() -> None:
    assert options_of({}) == options_of({"priority": 0, "timeout": 0, "own": "x"})
    assert math.isinf(options_of({}).seconds)
    found = options_of({"priority": 2, "timeout": 1_500_000})
    assert (found.priority, found.seconds) == (2, 1.5)
    numbers = ({"priority": -1}, {"priority": True}, {"timeout": "soon"}, {"timeout": 1.5})
    for bad in (*numbers, {"sequence_id": 1.5}, {"sequence_id": 1, "sequence_end": 1}):
        with pytest.raises(InvalidInputError):
            options_of(bad)
    found = options_of({"sequence_id": "a", "sequence_start": True})
    assert (found.sequence, found.starts, found.ends) == ("a", True, False)
    with pytest.raises(UnsupportedError, match="classification"):
        region_of({"classification": 3})
    assert region_of({"binary_data": True}) is None
    part = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    assert region_of(part) == RegionPart("r", 0, 8)
    with pytest.raises(InvalidInputError, match="shared_memory_offset"):
        region_of(part | {"shared_memory_offset": -8})


def test_sizes_of_plans_are_powers_of_two_unless_settings_name_them() -> None:
    assert ModelSettings().sizes(0) == ()
    assert ModelSettings().sizes(6) == (1, 2, 4, 6)
    assert settings_of({"max_batch_size": 8, "batch_sizes": [4]}).sizes(8) == (4, 8)


BAD_SETTINGS: tuple[dict[str, Any], ...] = (
    {"size": 3}, {"versions": []}, {"versions": ["1"]}, {"max_batch_size": -1}, {"max_batch_size": True},
    {"batch_sizes": [4]}, {"batch_sizes": [9], "max_batch_size": 8}, {"window_ms": "1"}, {"window_ms": 1e9},
    {"max_queue": 0}, {"priorities": 2, "default_priority": 3}, {"instances": 99}, {"devices": "cpu"},
    {"sequences": 33}, {"sequences": 2, "max_batch_size": 2}, {"sequence_idle_seconds": 0},
    {"warm_up": {"x": 3}},
)  # fmt: skip


@pytest.mark.parametrize("table", BAD_SETTINGS, ids=str)
def test_bad_settings_are_refused(table: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        settings_of(table)


def test_the_folder_has_models_and_nothing_else(tmp_path: Path) -> None:
    for path in (
        "a/1/model.onnx",
        "a/12/model.hgraph",
        "a/x/model.onnx",
        "b/0/model.onnx",
        ".c/1/model.onnx",
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "settled").mkdir()
    (tmp_path / "settled" / "model.toml").write_text("versions = [3]")
    outside = tmp_path / "outside"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "linked").symlink_to(tmp_path / "a")
    repository = Repository(str(tmp_path))
    assert repository.names() == ["a", "settled"]
    found = repository.find("a")
    assert found is not None and list(found.versions) == ["1", "12"]
    assert found.wanted(ModelSettings()) == ("12",)
    with pytest.raises(InvalidModelError, match="no version 3"):
        found.wanted(ModelSettings(versions=("3",)))
    for name in ("..", "a/1", "", ".c", "nothing", str(outside)):
        assert repository.find(name) is None
    assert Repository(str(tmp_path / "folder")).find("linked") is None
    empty = repository.find("settled")
    assert empty is not None
    with pytest.raises(InvalidModelError, match="has no version"):
        empty.wanted(repository.settings("settled"))


def test_a_folder_that_changes_while_it_is_read_is_no_error(tmp_path: Path) -> None:
    repository = Repository(str(tmp_path / "models"))
    with pytest.raises(UnavailableError, match="cannot read the folder of models"):
        repository.names()
    place, ended = tmp_path / "models" / "a" / "1", threading.Event()
    place.mkdir(parents=True)
    (place / "model.onnx").touch()

    def swap() -> None:
        while not ended.is_set():
            place.rename(tmp_path / "away")
            (tmp_path / "away").rename(place)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(500):
            found = repository.find("a")
            assert found is None or set(found.versions) <= {"1"}
            assert repository.names() in ([], ["a"])
    finally:
        ended.set()
        thread.join()
