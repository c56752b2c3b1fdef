"""The blocking API is generated from the asyncio one, and nothing of either is missing in the other."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import heliograph as hg

CLIENT = Path(__file__).resolve().parents[3] / "client"
CLASSES = ("Buffer", "Device", "Event", "Plan", "RunFuture", "Session", "Stream", "Tensor", "WriteFuture")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", CLIENT / "generate.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


GENERATOR = generator()


@pytest.mark.parametrize("name", GENERATOR.SOURCES)
def test_generated_files_are_fresh(name: str) -> None:
    text = (CLIENT / f"heliograph/{name}.py").read_text()
    assert text == GENERATOR.generated(name), "run `make generate`"


def public(of: object) -> dict[str, Any]:
    return {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}


@pytest.mark.parametrize("name", CLASSES)
def test_both_apis_have_the_same_names_with_the_same_arguments(name: str) -> None:
    blocking, asyncio = public(getattr(hg, name)), public(getattr(hg.aio, name))
    assert blocking.keys() == asyncio.keys()
    for method in blocking:
        if callable(blocking[method]):
            pair = [inspect.signature(one[method]) for one in (blocking, asyncio)]
            parameters = [[(p.name, p.kind, p.default) for p in one.parameters.values()] for one in pair]
            assert parameters[0] == parameters[1], method


@pytest.mark.parametrize("name", CLASSES)
def test_docstrings_speak_of_their_own_api(name: str) -> None:
    for module, other in (
        (hg, ("asyncio", "hg.aio", "await")),
        (hg.aio, ("Ctrl-C", "Blocks", "thread-safe")),
    ):
        found = getattr(module, name)
        texts = [found.__doc__ or "", *(inspect.getdoc(one) or "" for one in public(found).values())]
        assert not [word for word in other for text in texts if word in text]
