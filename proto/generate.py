"""Generate the Python modules and type stubs of every .proto file below this folder.

The files lie in the folders of their Python package (heliograph_proto/v1/graph.proto becomes
heliograph_proto.v1.graph_pb2), while their protobuf package is heliograph.v1; so the imports that
protoc generates are correct.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def plugin_path(name: str) -> str:
    """Return the path of a protoc plugin next to this interpreter, or on PATH."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is missing; install it with: pip install mypy-protobuf")
    return found


def generate() -> list[Path]:
    """Run protoc in this process and return the sources."""
    from grpc_tools import protoc

    sources = sorted(ROOT.rglob("*.proto"))
    arguments = ["protoc", f"-I{ROOT}", f"-I{files('grpc_tools') / '_proto'}"]
    for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc"):
        arguments.append(f"--plugin={name}={plugin_path(name)}")
    arguments += [f"--python_out={ROOT}", f"--mypy_out=quiet:{ROOT}"]
    arguments += [f"--grpc_python_out={ROOT}", f"--mypy_grpc_out=quiet:{ROOT}"]
    code = protoc.main(arguments + [str(source.relative_to(ROOT)) for source in sources])
    if code:
        raise SystemExit(code)
    for source in sources:
        if "\nservice " not in source.read_text():
            drop_empty_service_modules(source)
    return sources


def drop_empty_service_modules(source: Path) -> None:
    """Delete the _pb2_grpc pair that protoc writes even for a file without services."""
    for suffix in ("_pb2_grpc.py", "_pb2_grpc.pyi"):
        source.with_name(source.stem + suffix).unlink(missing_ok=True)


if __name__ == "__main__":
    for written in generate():
        print(written.relative_to(ROOT), file=sys.stderr)
