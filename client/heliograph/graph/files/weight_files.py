"""Weights in a safetensors file: each content once, under the name of the first weight that has it.

Quantized types lie there as rows of bytes (U8), bf16 as BF16; the metadata "heliograph" says which
tensors are rows of blocks, and of which type. Reading maps the file into memory, and takes the
digest of each content: one that is not what the graph says is refused.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from heliograph.graph.digests import threads
from heliograph.graph.files.atomic_files import replacing, unwritable
from heliograph.graph.files.mapped_files import digest_of, readable
from heliograph_proto.codec.files import FORMAT
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError, InvalidModelError
from heliograph_proto.graph import Graph, Leaf, LeafKind
from heliograph_proto.types import DType, TensorType

Array = np.ndarray[Any, Any]

#: The key of our metadata. One key alone, since the library writes several in any order.
METADATA = "heliograph"
#: A name that the format reserves.
_RESERVED = "__metadata__"
#: Bytes in front of the header: its length.
_LENGTH_BYTES = 8

_AGAIN = "copy the file again, or save the graph anew"


def contents(graph: Graph) -> dict[str, Leaf]:
    """The contents that a graph needs, each once, by the name of the first leaf that has it.

    Weights that are bound to a session's tensors have none. Variables have their first elements,
    under "initial NAME".
    """
    first: dict[bytes, Leaf] = {}
    for leaf in (*graph.weights, *graph.variables):
        if leaf.digest:
            first.setdefault(leaf.digest, leaf)
    found: dict[str, Leaf] = {}
    for leaf in first.values():
        name = leaf.name if leaf.kind is LeafKind.WEIGHT else f"initial {leaf.name}"
        while name in found:
            name += "_"
        found[name] = leaf
    return found


def write_weights(path: Path, graph: Graph, arrays: Mapping[bytes, Array]) -> None:
    """Write the contents of a graph's weights, which `arrays` has by digest; always the same
    bytes.

    Replaces such a file, but no other. Raises InvalidArgumentError when it cannot be written,
    ConfigurationError without safetensors.
    """
    library = _library()
    _check_replaceable(library, path)
    found = contents(graph)
    if _RESERVED in found:
        raise InvalidArgumentError(
            f"a weight is named {_RESERVED!r}, which safetensors keeps for itself", advice="rename it"
        )
    specs = {name: _spec(library, leaf.type, arrays[leaf.digest]) for name, leaf in found.items()}
    blocks = {name: str(leaf.type) for name, leaf in found.items() if leaf.type.dtype.kind == "quantized"}
    metadata = {METADATA: json.dumps({"format": FORMAT, "types": blocks}, ensure_ascii=False, sort_keys=True)}
    with replacing(path) as part:
        try:
            library.serialize_file(specs, part, metadata)
        except library.SafetensorError as error:
            raise unwritable(path, str(error)) from None


def _check_replaceable(library: Any, path: Path) -> None:
    """Raises InvalidArgumentError where weights lie that `hg.save` did not write: the only copy,
    perhaps."""
    if not path.exists():
        return
    try:
        with library.safe_open(path, framework="numpy") as file:
            is_ours = METADATA in (file.metadata() or {})
    except (library.SafetensorError, OSError):
        is_ours = False
    if not is_ours:
        raise InvalidArgumentError(
            f"{path} is there already, and hg.save did not write it",
            advice="give the graph another name, or remove that file",
        )


def _spec(library: Any, type_: TensorType, array: Array) -> Any:
    """Describe a content's memory. The arrays outlive the writing, which copies none of them."""
    return library.TensorSpec(
        dtype=type_.dtype.numpy_name or ("bfloat16" if type_.dtype.is_float else "uint8"),
        shape=type_.storage_shape,
        data_ptr=array.ctypes.data,
        data_len=type_.nbytes,
    )


def code_of(dtype: DType) -> str:
    """The format's name of what holds a data type: "F32", "BF16", "U8" for blocks."""
    if dtype.kind == "quantized":
        return "U8"
    return dtype.name.upper()


def read_weights(path: Path, graph: Graph) -> dict[bytes, Array]:
    """The contents of a graph's weights by digest, read-only, in the storage of their types,
    checked.

    The arrays lie in the file, which is mapped into memory. It may be replaced. If it is truncated,
    uploading them raises InvalidArgumentError, and reading them in this process ends it.

    Raises InvalidModelError, ConfigurationError without safetensors.
    """
    library = _library()
    if not path.is_file():
        raise InvalidModelError(
            f"the weights are missing: {path} is no file",
            advice="copy them there too, or say where they are: hg.load(path, weights=...), --weights FILE",
        )
    try:
        with library.safe_open(path, framework="numpy"):
            # The library has checked the header: offsets and sizes fit, and cover the file.
            pass
        data, header = _map(path)
        needed = contents(graph).items()
        return {leaf.digest: _content(path, leaf, data, header.get(name)) for name, leaf in needed}
    except (library.SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidModelError(f"cannot read the weights in {path}: {error}", advice=_AGAIN) from None


def _map(path: Path) -> tuple[memoryview, dict[str, Any]]:
    """The tensors' bytes, and what the header says of each. Raises ValueError, OSError."""
    with path.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = _LENGTH_BYTES + int.from_bytes(readable(whole[:_LENGTH_BYTES]), "little")
    return whole[start:], json.loads(bytes(readable(whole[_LENGTH_BYTES:start])))


def _content(path: Path, leaf: Leaf, data: memoryview, entry: Any) -> Array:
    """One content, checked. Raises InvalidModelError."""
    if entry is None:
        raise InvalidModelError(f"{path} has no weight {leaf.name!r}", advice=_other(path))
    type_ = leaf.type
    if (entry["dtype"], tuple(entry["shape"])) != (code_of(type_.dtype), type_.storage_shape):
        found = f"{entry['dtype']} {tuple(entry['shape'])}"
        raise InvalidModelError(
            f"{path}: weight {leaf.name!r} is {found}; the graph needs {type_}", advice=_other(path)
        )
    begin, end = entry["data_offsets"]
    part = data[begin:end]
    if digest_of(part, threads()) != leaf.digest:
        raise InvalidModelError(
            f"{path}: weight {leaf.name!r} has other contents than the graph was saved with",
            advice=f"the file is damaged or of another model; {_AGAIN}",
        )
    array: Array = np.frombuffer(part, type_.dtype.storage).reshape(type_.storage_shape)
    return array


def _other(path: Path) -> str:
    return f"{path.name} is of another model; say where this one's is: hg.load(path, weights=...)"


def _library() -> Any:
    try:
        import safetensors
    except ImportError:
        raise ConfigurationError(
            "the package 'safetensors' is not installed", advice="pip install 'heliograph[models]'"
        ) from None
    return safetensors
