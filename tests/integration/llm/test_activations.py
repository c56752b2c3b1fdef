"""Rows that are rounded to q8_0 before products: on CPUs unless a caller wants f32, near its logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf_files import write_model
from llm_models import NumpyModel, error_of, write_encoder, write_other

import heliograph as hg
from heliograph_backends.cpu.kernels.program.stored_types import INTEGER_KINDS
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry, open_registry
from heliograph_proto.quantization import ROUNDED_ROWS

TOKENS = np.random.default_rng(12).integers(3, 500, 45).tolist()
#: Rounding to eight bits, in each product of a small model.
BOUND = 2e-3
#: Elements that other sums round to another quantum than the reference's.
REFERENCE_BOUND = 1e-6


@pytest.fixture
def session() -> Iterator[hg.Session]:
    with hg.connect("local:") as session:
        yield session


def logits(session: hg.Session, path: Path, **loading: Any) -> Any:
    llm = hg.llm.load(session, path, **loading)
    found = llm.logits(TOKENS)
    llm.close()
    return found


@pytest.mark.parametrize("stored", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_are_near_those_in_f32(session: hg.Session, tmp_path: Path, name: str, stored: str) -> None:
    path = write_model(tmp_path / "m.gguf", name, stored)
    wide, rounded = logits(session, path, activations="f32"), logits(session, path)
    error = error_of(rounded, wide)
    print(f"normalised error {error:.1e}")
    assert 0 < error < BOUND


@pytest.mark.parametrize("stored", ["q8_0", "q4_0", "q4_k", "q6_k", "iq4_xs", "mxfp4"])
def test_logits_are_those_of_a_reference_that_rounds_rows(
    session: hg.Session, tmp_path: Path, stored: str
) -> None:
    sizes = {"width": 256, "row": 64, "hidden": 256, "layers": 1}
    path = write_model(tmp_path / "m.gguf", "llama", stored, **sizes)
    check_reference(session, path)


def check_reference(session: hg.Session, path: Path) -> None:
    found = logits(session, path, cache="f32")
    errors = [error_of(found, NumpyModel(path, rounds_rows=one).logits(TOKENS)) for one in (True, False)]
    print(f"normalised errors {errors[0]:.1e}, and {errors[1]:.1e} without rounding")
    assert errors[0] < REFERENCE_BOUND < errors[1]


def test_experts_take_rounded_rows_too(session: hg.Session, tmp_path: Path) -> None:
    path = write_other(tmp_path / "m.gguf", "gpt-oss", experts=GGMLQuantizationType.MXFP4)
    assert 0 < error_of(logits(session, path), logits(session, path, activations="f32")) < BOUND
    check_reference(session, path)


def test_weights_of_floats_keep_rows_in_f32(session: hg.Session, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", "f16")
    assert logits(session, path).tobytes() == logits(session, path, activations="f32").tobytes()


def test_rows_are_rounded_on_a_cpu_unless_a_caller_wants_f32(session: hg.Session, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", "q4_0")
    by_default = logits(session, path).tobytes()
    assert by_default == logits(session, path, activations="auto").tobytes()
    assert by_default == logits(session, path, activations="q8").tobytes()
    assert by_default != logits(session, path, activations="f32").tobytes()


def test_decoded_rows_are_those_of_a_prompt_to_the_bit(session: hg.Session, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", "q4_0", context=256)
    llm = hg.llm.load(session, path)
    first = llm.generate(TOKENS, max_tokens=30, temperature=0, logprobs=True).result()
    longer = [*TOKENS, *first.tokens[:20]]
    llm.logits(TOKENS[:7])
    computed = llm.generate(longer, max_tokens=10, temperature=0, logprobs=True).result()
    assert computed.reused_tokens < len(TOKENS)
    assert first.logprobs[20:] == computed.logprobs


def test_embeddings_take_rounded_rows_too(session: hg.Session, tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "m.gguf", "bert", stored=GGMLQuantizationType.Q8_0)
    wide, rounded, by_default = (
        hg.llm.load(session, path, activations=which).embed("a text") for which in ("f32", "q8", "auto")
    )
    assert (wide * rounded).sum() > 0.999 and (rounded == by_default).all()
    assert (wide != rounded).any()


def test_another_precision_is_refused_by_name(session: hg.Session, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", "q4_0")
    with pytest.raises(hg.InvalidArgumentError, match="activations is 'q4'") as caught:
        hg.llm.load(session, path, activations="q4")  # type: ignore[call-overload]
    assert "auto, f32, q8" in str(caught.value)


def test_rows_are_rounded_where_a_cpu_multiplies_integers() -> None:
    assert {kind.name.lower() for kind in INTEGER_KINDS} == ROUNDED_ROWS


# Devices that are no CPUs


class Wide(FakeDevice):
    """It multiplies rows of floats alone."""

    def supports_op(self, op: str, attributes: Any, operands: Any, result: Any) -> str:
        rounds = op in ("mul_mat", "mul_mat_id") and operands[1].dtype.name == "q8_0"
        return "no kernel takes rows in q8_0" if rounds else ""


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[hg.Session]:
    """A processor, and an accelerator with memory of its own."""
    made = [*open_registry(("cpu:threads=1",)).devices, Wide("far", 2**26, is_host=False)]
    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(*made))
    with hg.connect("local:") as session:
        yield session


def test_a_model_on_devices_of_both_kinds_keeps_all_rows_in_f32(mixed: hg.Session, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", "q4_0")
    placed: Any = {"devices": ["cpu0", "far"], "pins": {"layer0/*": "cpu0", "layer1/*": "far"}}
    llm = hg.llm.load(mixed, path, **placed)
    assert {node.device for node in llm.plans[0].explain().nodes} == {"cpu0", "far"}
    found = llm.logits(TOKENS)
    assert found.tobytes() == logits(mixed, path, activations="f32", **placed).tobytes()
    wide, rounded = (
        error_of(found, logits(mixed, path, devices="cpu0", activations=one)) for one in ("f32", "auto")
    )
    assert wide < 1e-9 < rounded


def test_a_device_that_takes_no_rounded_rows_is_named(mixed: hg.Session, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", "q4_0")
    with pytest.raises(hg.UnsupportedError, match="far.*no kernel takes rows in q8_0") as caught:
        hg.llm.load(mixed, path, devices="far", activations="q8")
    assert 'activations="f32"' in str(caught.value.advice)
