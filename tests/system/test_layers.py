"""The layout as a test: which folder may import which, and which folders decide without input or output.

An import counts wherever it stands, also inside a function, except under TYPE_CHECKING: annotations
need no layer. Each list below goes from the bottom to the top, so it has no room for a cycle.
"""

from __future__ import annotations

import ast
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
#: What both the rules of ONNX's ops and the walk of a graph are made of.
ONNX_BASE = "= onnx/checks onnx/elements onnx/errors onnx/node onnx/ports onnx/rules onnx/tensors"
#: The same of PyTorch's.
TORCH_BASE = "= torch/elements torch/errors torch/node torch/rules"
#: The sizes of a language model, and the parts of its layers.
LLM_BASE = "= llm/configuration llm/decoding_step"
#: The layers of each package, bottom first: folders, and modules at the package's root. Those of one line do
#: not import each other, except where the line begins with "=": it is one place.
LAYERS = {
    "heliograph_proto": (
        "types digests eager settings process_facts pace tracebacks",
        "errors",
        "ops quantization devices addresses trace_context models gguf",
        "sessions",
        "graph",
        "plans",
        "commands kserve",
        "codec",
    ),
    "heliograph_backends": (
        "contract",
        "host_memory planning reference",
        "cpu/kernels/program",
        "cpu/kernels/vector",
        "cpu/kernels/elementwise",
        "cpu/kernels/matmul",
        "cpu/kernels/rows",
        "cpu/kernels/runtime",
        "cpu/kernels",
        "cpu/lowering cuda/driver",
        "cpu cuda/lowering",
        "cuda fake",
        "registry",
        "conformance/harness",
        "conformance/contract_checks",
        "conformance/cases",
        "conformance",
    ),
    "heliograph_server": (
        "config",
        "scheduler",
        "resources",
        "exchange weights session/protocol",
        "plans",
        "compile",
        "session",
        "state",
        "runtime",
        "auth telemetry",
        "links",
        "pool/remote",
        "launchers",
        "launchers/ray",
        "pool",
        "inprocess",
        "rpc",
        "http",
        "gateways/ggml_rpc/wire gateways/ggml_rpc/regions",
        "gateways/ggml_rpc/buffers gateways/ggml_rpc/building",
        "gateways/ggml_rpc/ops",
        "gateways/ggml_rpc",
        "gateways/kserve",
        "gateways",
        "web",
        "daemon",
        "commands",
    ),
    "heliograph": (
        "notebook",
        "_probe errors graph _base/kept_plans",
        "_bootstrap",
        "functions core explain",
        "autodiff optim random",
        "procedures",
        "transport",
        "_base",
        "= ops array_access tensor device run_future plan tracking watching session connection raw admin",
        "head",
        "aio",
        "comparison lowerings models testing",
        "windows",
        ONNX_BASE,
        "onnx/ops",
        "onnx",
        TORCH_BASE,
        "torch/ops",
        "torch",
        "llm/products",
        "llm/tokenizers llm/chat llm/files",
        "llm/constraints",
        "llm/tools",
        LLM_BASE,
        "llm/architectures",
        "llm",
        "llm/serving",
        "llm/serving/http",
        "heliograph",
        "cli/common",
        "cli/doctor",
        "cli",
        "demo __main__",
    ),
}
#: Folders that may import less than everything below them.
NARROWER = {
    "heliograph_server/scheduler": (),
    "heliograph_server/resources": ("scheduler",),
    "heliograph_server/exchange": ("resources",),
    "heliograph_server/weights": ("resources", "scheduler"),
    "heliograph_server/session/protocol": ("resources",),
    "heliograph_server/plans": ("resources", "scheduler", "exchange"),
    "heliograph_server/launchers": ("config",),
    "heliograph_backends/cuda": (
        "contract",
        "host_memory",
        "planning",
        "reference",
        "cuda/driver",
        "cuda/lowering",
    ),
    "heliograph_backends/conformance/harness": ("contract", "reference"),
    # Importers of models use the public names of `heliograph`; of its inside, only
    # the plans that are kept, and the check of a timeout.
    "heliograph/lowerings": (),
    f"heliograph/{ONNX_BASE}": ("lowerings",),
    "heliograph/onnx/ops": (ONNX_BASE, "lowerings"),
    "heliograph/onnx": (ONNX_BASE, "_base/kept_plans", "graph", "lowerings", "onnx/ops"),
    f"heliograph/{TORCH_BASE}": ("lowerings",),
    "heliograph/llm/tokenizers": ("errors",),
    "heliograph/llm/chat": ("errors",),
    "heliograph/llm/products": (),
    "heliograph/llm/files": ("llm/products",),
    "heliograph/llm/constraints": ("errors", "llm/tokenizers"),
    "heliograph/llm/tools": ("errors", "llm/constraints"),
    f"heliograph/{LLM_BASE}": ("llm/products",),
    "heliograph/llm/architectures": (LLM_BASE, "llm/products"),
    "heliograph/llm": (
        LLM_BASE,
        "_base",
        "llm/architectures",
        "llm/chat",
        "llm/constraints",
        "llm/files",
        "llm/tokenizers",
        "llm/tools",
        "lowerings",
    ),
    "heliograph/llm/serving": (
        LLM_BASE,
        "llm",
        "llm/architectures",
        "llm/constraints",
        "llm/files",
        "llm/tokenizers",
        "llm/tools",
    ),
    "heliograph/llm/serving/http": ("llm", "llm/constraints", "llm/serving", "llm/tokenizers"),
    "heliograph/torch/ops": (TORCH_BASE, "lowerings"),
    "heliograph/torch": (TORCH_BASE, "_base/kept_plans", "lowerings", "torch/ops"),
}
#: Which other packages a package may import; the server imports the client in some folders alone.
OTHERS = {
    "heliograph_proto": (),
    "heliograph_backends": ("heliograph_proto",),
    "heliograph_server": ("heliograph_proto", "heliograph_backends"),
    "heliograph": ("heliograph_proto",),
}
#: Folders of the server that are clients of other daemons, or a transport of the client.
CLIENTS_OF_THE_CLIENT = ("pool", "links", "inprocess", "commands", "daemon", "telemetry", "rpc", "gateways")
#: The only part of the client that the dashboard uses: the pictures of plans.
PICTURES = ("heliograph_server/web", "heliograph/explain")
#: Folders and modules that decide, and so know no clock, thread, socket, event loop or device.
PURE = (
    "heliograph_proto",
    "heliograph_backends/planning",
    "heliograph_backends/contract/placement",
    "heliograph_backends/cpu/lowering",
    "heliograph_backends/cuda/lowering",
    "heliograph_backends/cuda/driver/failures",
    "heliograph_backends/registry/specification",
    "heliograph_server/scheduler",
    "heliograph_server/session/protocol",
    "heliograph_server/resources/handles",
    "heliograph_server/resources/checks",
    "heliograph_server/exchange/ledger",
    "heliograph_server/runtime/whereabouts",
    "heliograph_server/runtime/keeper",
    "heliograph_server/rpc/leases/attaching",
    "heliograph_server/compile/renaming",
    "heliograph_server/gateways/kserve/batching",
    "heliograph_server/gateways/kserve/requests",
    "heliograph_server/gateways/kserve/tensors",
    "heliograph/core/protocol",
    "heliograph/core/credit",
    "heliograph/explain/pictures",
    "heliograph/llm/constraints/forms",
    "heliograph/llm/tools",
    "heliograph/cli/doctor/findings",
    "heliograph/cli/doctor/growth",
    "heliograph/cli/doctor/measurements",
)
IMPURE_IMPORTS = {
    "asyncio", "concurrent", "grpc", "multiprocessing", "numba", "os", "select", "signal", "socket",
    "subprocess", "threading", "time", "uvloop",
}  # fmt: skip
#: Folders of the server in which gRPC may be imported.
GRPC = ("auth", "rpc", "links", "pool", "inprocess", "gateways", "daemon", "telemetry", "commands")
MOST_MODULES = 17


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of ours, as `package/folder/module`; a folder's `__init__` is the folder."""
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            if "_pb2" not in path.name:
                parts = path.relative_to(folder).with_suffix("").parts
                yield "/".join((package, *(part for part in parts if part != "__init__"))), path


NAMES = dict(modules())


def imports(path: Path) -> set[str]:
    """The modules that a file imports at run time, as names of NAMES, or dotted names of other libraries."""
    tree = ast.parse(path.read_text())
    annotations = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in annotations:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name.replace(".", "/") for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path} imports relatively"
            base = node.module.replace(".", "/")
            found |= {inner if (inner := f"{base}/{name.name}") in NAMES else base for name in node.names}
    return found


def layer(name: str) -> tuple[int, str]:
    """The number of a module's layer in its package, and the place in that layer."""
    package, _, rest = name.partition("/")
    rows = LAYERS[package]
    levels = {place: number for number, row in enumerate(rows) for place in row.split()}
    parts = rest.split("/") if rest else [package]
    for length in range(len(parts), 0, -1):
        if (place := "/".join(parts[:length])) in levels:
            row = rows[levels[place]]
            return levels[place], row if row.startswith("=") else place
    # The package itself is an index of names, above everything that it names.
    return len(levels), package


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_only_those_below_them(package: str) -> None:
    wrong = []
    for name, path in modules():
        if name.partition("/")[0] != package or name == package:
            continue
        level, place = layer(name)
        for imported in imports(path):
            if imported.partition("/")[0] != package or imported == package or "v1" in imported.split("/"):
                continue
            below, other = layer(imported)
            allowed = NARROWER.get(f"{package}/{place}")
            if other != place and (below >= level or (allowed is not None and other not in allowed)):
                wrong.append(f"{name} imports {imported}")
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way(package: str) -> None:
    """client -> proto <- backends <- server; the server uses the client to reach other daemons, and its
    pictures of plans."""
    wrong = []
    for name, path in modules():
        if name.partition("/")[0] != package:
            continue
        allowed = OTHERS[package]
        if name.startswith(tuple(f"heliograph_server/{folder}" for folder in CLIENTS_OF_THE_CLIENT)):
            allowed = (*allowed, "heliograph")
        for imported in imports(path):
            other = imported.partition("/")[0]
            if name.startswith(PICTURES[0]) and imported.startswith(PICTURES[1]):
                continue
            if other in PACKAGES and other not in (package, *allowed):
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_each_folder_is_in_a_layer() -> None:
    for package, folder in PACKAGES.items():
        places = {place for row in LAYERS[package] for place in row.split()}
        for path in folder.rglob("__init__.py"):
            inner = path.parent.relative_to(folder).as_posix()
            if inner not in (".", "v1"):
                assert inner in places or inner.rpartition("/")[0] in places, (
                    f"{package}/{inner} has no layer"
                )


def test_no_folder_is_a_heap() -> None:
    for package, folder in PACKAGES.items():
        for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            found = [
                path for path in inner.glob("*.py") if "_pb2" not in path.name and path.stem != "__init__"
            ]
            assert len(found) <= MOST_MODULES, f"{package}: {inner.name} has {len(found)} modules"


def test_pure_folders_know_no_clock_thread_or_socket() -> None:
    found = {
        name: sorted(impure)
        for name, path in modules()
        if name.startswith(PURE)
        and (impure := {imported.partition("/")[0] for imported in imports(path)} & IMPURE_IMPORTS)
    }
    assert not found


def test_grpc_stays_at_the_edges_of_the_server() -> None:
    for name, path in modules():
        package, _, rest = name.partition("/")
        if package == "heliograph_server" and rest.partition("/")[0] not in GRPC:
            found = {imported.partition("/")[0] for imported in imports(path)}
            assert not found & {"grpc", "grpc_health", "uvloop", "numba"}, name
