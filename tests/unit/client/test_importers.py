"""The packages `hg.onnx` and `hg.torch`, whose names are imported on first use."""

from __future__ import annotations

import importlib
import sys

import pytest

import heliograph as hg


@pytest.mark.parametrize(
    ("package", "name", "missing", "advice"),
    [
        ("onnx", "load", "onnx", r"heliograph\[onnx\]"),
        ("torch", "export", "torch", "pytorch.org"),
    ],
)
def test_a_name_without_its_package_says_what_to_install(
    package: str, name: str, missing: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"heliograph.{package}")
    for loaded in [one for one in sys.modules if one.startswith(f"heliograph.{package}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.delitem(vars(module), name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(hg.ConfigurationError, match=rf"'{missing}' is not installed.*\n.*{advice}"):
        getattr(module, name)


@pytest.mark.parametrize("package", ["onnx", "torch"])
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    module = importlib.import_module(f"heliograph.{package}")
    with pytest.raises(AttributeError, match=f"'heliograph.{package}' has no attribute 'nothing'"):
        _ = module.nothing
    assert dir(module) == sorted(module.__all__)
