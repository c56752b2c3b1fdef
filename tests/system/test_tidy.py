"""The style of the house as a test: docstrings, sizes, and the contract's comments."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

PACKAGES = {
    "heliograph_proto": ROOT / "proto/heliograph_proto",
    "heliograph_backends": ROOT / "backends/heliograph_backends",
    "heliograph_server": ROOT / "server/heliograph_server",
    "heliograph": ROOT / "client/heliograph",
}
LONGEST_FILE = 700
LONGEST_FUNCTION = 60


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours, without generated code."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            if "_pb2" not in path.name:
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join((package, *(p for p in parts if p != "__init__"))), path


def test_modules_say_what_they_are_for() -> None:
    for name, path in modules():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{name} has no docstring"


def test_public_names_are_documented() -> None:
    """Every public class has a docstring; so has every public function that is not one line."""
    missing = []
    for name, path in modules():
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            long = isinstance(node, ast.ClassDef) or len(node.body) > 3
            if long and not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{name}.{node.name}")
    exempt = re.compile(r"heliograph_proto\.(commands|codec)|heliograph_backends\.reference")
    assert [one for one in missing if not exempt.match(one)] == []


def test_files_and_functions_stay_short() -> None:
    for name, path in modules():
        text = path.read_text()
        assert len(text.splitlines()) <= LONGEST_FILE, f"{name} has {len(text.splitlines())} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= LONGEST_FUNCTION, f"{name}.{node.name} has {length} lines"


def test_nothing_unfinished_is_left() -> None:
    for name, path in modules():
        found = re.findall(r"\b(TODO|FIXME|XXX|NotImplementedError|pickle\.load\w*)\b", path.read_text())
        assert not found, f"{name}: {found}"


def test_exported_names_exist() -> None:
    # `hg.torch` has its names where PyTorch is installed, and a test there.
    for name, path in modules():
        if "__all__" in path.read_text() and "kernels" not in name and "heliograph.torch" not in name:
            module = importlib.import_module(name)
            for exported in getattr(module, "__all__", ()):
                assert hasattr(module, exported), f"{name}.__all__ names {exported}"


def proto_files() -> list[Path]:
    return sorted((ROOT / "proto").rglob("*.proto"))


@pytest.mark.parametrize("path", proto_files(), ids=lambda path: path.stem)
def test_every_component_of_the_contract_is_commented(path: Path) -> None:
    """Services, methods, messages, fields, enums and values: the .proto files are the manual."""
    lines = path.read_text().splitlines()
    component = re.compile(
        r"\s*(service|rpc|message|enum|oneof)\s+\w+"
        r"|\s*(repeated |optional )?[\w.]+ \w+ = \d+;"
        r"|\s*[A-Z][A-Z0-9_]+ = \d+;"
    )
    for number, line in enumerate(lines):
        if component.match(line) and not line.lstrip().startswith("//"):
            assert lines[number - 1].lstrip().startswith("//"), f"{path.name}:{number + 1}: {line}"


def test_every_enum_begins_with_unspecified() -> None:
    for path in proto_files():
        for name, body in re.findall(r"enum (\w+) \{(.*?)\n\}", path.read_text(), re.S):
            first = re.search(r"(\w+) = 0;", body)
            assert first and first[1].endswith("_UNSPECIFIED"), f"{path.name}: {name}"
