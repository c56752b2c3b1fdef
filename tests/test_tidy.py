"""The style of the house as a test: import directions, pure modules, the contract's comments, sizes."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "heliograph_proto": ROOT / "proto/heliograph_proto",
    "heliograph_backends": ROOT / "backends/heliograph_backends",
    "heliograph_server": ROOT / "server/heliograph_server",
    "heliograph": ROOT / "client/heliograph",
}
#: Which packages each may import; imports inside functions count, except where LAZY says so.
ALLOWED = {
    "heliograph_proto": set(),
    "heliograph_backends": {"heliograph_proto"},
    "heliograph_server": {"heliograph_proto", "heliograph_backends", "heliograph"},
    "heliograph": {"heliograph_proto"},
}
#: Modules of the client that load the server inside a function: the in-process mode and the commands.
LAZY = ("heliograph.cli", "heliograph.local", "heliograph._local", "heliograph.demo")
#: Modules that decide, and so know no clock, thread, socket, event loop or device.
PURE = (
    "heliograph_proto",
    "heliograph_backends.planning",
    "heliograph_backends.cpu.lowering",
    "heliograph_backends.planning.storage",
    "heliograph_server.core.protocol",
    "heliograph_server.core.ordering",
    "heliograph_server.core.handles",
    "heliograph_server.core.transfers",
    "heliograph_server.core.arrival",
    "heliograph_server.core.checks",
    "heliograph_server.core.exchanging.ledger",
    "heliograph_server.core.plan_core",
    "heliograph_server.core.loops",
    "heliograph_server.core.memories",
    "heliograph_server.core.observing_core",
    "heliograph_server.core.queries",
    "heliograph_server.core.scheduling",
    "heliograph_server.core.slices",
    "heliograph_server.core.tasks",
    "heliograph_backends.placement",
    "heliograph_backends.cuda.attending",
    "heliograph_backends.cuda.chains",
    "heliograph_backends.cuda.failures",
    "heliograph_backends.cuda.filling",
    "heliograph_backends.cuda.generating",
    "heliograph_backends.cuda.interpreting",
    "heliograph_backends.cuda.joining",
    "heliograph_backends.cuda.lowering",
    "heliograph_backends.cuda.moves",
    "heliograph_backends.cuda.products",
    "heliograph_backends.cuda.programs",
    "heliograph_backends.cuda.rows",
    "heliograph_backends.cuda.stored",
    "heliograph_backends.cuda.target",
    "heliograph_backends.cuda.turning",
    "heliograph_backends.registry.specification",
    "heliograph.cli.findings",
    "heliograph.cli.growth",
    "heliograph.cli.measurements",
    "heliograph._credit",
    "heliograph.protocol",
)
IMPURE_IMPORTS = {
    "asyncio", "concurrent", "grpc", "multiprocessing", "numba", "os", "select", "signal", "socket",
    "subprocess", "threading", "time", "uvloop",
}  # fmt: skip
LONGEST_FILE = 600
LONGEST_FUNCTION = 60


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours, without generated code."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            if "_pb2" not in path.name:
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join((package, *(p for p in parts if p != "__init__"))), path


def imports_of(path: Path, *, top_level: bool = False) -> set[str]:
    """Names of the modules that a file imports."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if not top_level else runtime_statements(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def runtime_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported; not those under TYPE_CHECKING."""
    for node in tree.body:
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    """client -> proto <- backends <- server -> client."""
    for name, path in modules():
        if name.partition(".")[0] != package:
            continue
        lazy = name.startswith(LAZY)
        for imported in imports_of(path, top_level=lazy):
            other = imported.partition(".")[0]
            if other in PACKAGES and other != package:
                assert other in ALLOWED[package], f"{name} imports {imported}"


def test_pure_modules_know_no_clock_thread_or_socket() -> None:
    for name, path in modules():
        if name.startswith(PURE):
            found = {imported.partition(".")[0] for imported in imports_of(path, top_level=True)}
            assert not found & IMPURE_IMPORTS, f"{name} imports {sorted(found & IMPURE_IMPORTS)}"


def test_the_core_of_the_server_imports_no_grpc_uvloop_or_numba() -> None:
    for name, path in modules():
        if name.startswith("heliograph_server.core"):
            found = {imported.partition(".")[0] for imported in imports_of(path)}
            assert not found & {"grpc", "grpc_health", "uvloop", "numba", "asyncio"}, name


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
    exempt = re.compile(r"heliograph_proto\.(commands|messages)|heliograph_backends\.definition")
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
    for name, path in modules():
        if "__all__" in path.read_text() and "kernels" not in name:
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
