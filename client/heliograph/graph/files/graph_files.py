"""`hg.save` and `hg.load`: graphs in files.

    hg.save(graph, "model.hgraph")          # and model.safetensors beside it, if there are weights
    graph = hg.load("model.hgraph")

A graph file (v1/file.proto) has a header and the graph in its wire form. Its weights are a
safetensors file (see `weight_files`), which other programs can read. Loaded graphs are checked like
graphs from the wire: digests, the rules of the op table, limits.
"""

from __future__ import annotations

import os
from pathlib import Path

from heliograph.graph.builder import Graph
from heliograph.graph.files.atomic_files import replacing
from heliograph.graph.files.weight_files import contents, read_weights, write_weights
from heliograph.graph.frozen import thaw
from heliograph.graph.server_weights import check_here
from heliograph_proto.codec.files import MAX_FILE_BYTES, decode_graph_file, encode_graph_file, error_of
from heliograph_proto.errors import HeliographError, InvalidArgumentError, InvalidModelError

#: The usual suffix of a graph file, and that of its weights.
SUFFIX = ".hgraph"
WEIGHTS_SUFFIX = ".safetensors"
_OF_WEIGHTS = (
    "it holds weights and no graph: `heliograph generate` runs language models of GGUF files; else build the "
    "graph in Python, with session.server_weights(FILE) or arrays for its weights, write it by "
    "hg.save(graph, 'model.hgraph'), and name that file"
)


def save(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph to a file, and its weights beside it: model.hgraph, model.safetensors.

    Each file is replaced whole, the weights first. The same graph gives the same bytes. Weights are
    written in place, without a copy.

    Raises:
        InvalidGraphError: no server would take the graph; it has no outputs, for example.
        LimitExceededError: the graph is too large.
        InvalidArgumentError: a file cannot be written, or a file of weights lies there that hg.save
            did not write.
        ConfigurationError: there are weights, and safetensors is not installed.
    """
    if not isinstance(graph, Graph):
        raise InvalidArgumentError(f"{graph!r:.80} is no graph", advice="hg.save(graph, 'model.hgraph')")
    check_here(graph)
    target, (frozen, arrays) = Path(path), graph._freeze_for_file()
    beside = weights_path(target)
    data = encode_graph_file(frozen)
    if contents(frozen):
        write_weights(beside, frozen, arrays)
    with replacing(target) as part:
        part.write_bytes(data)


def load(path: str | os.PathLike[str], *, weights: str | os.PathLike[str] | None = None) -> Graph:
    """Load a graph from a file, to compile it or to go on building it.

    Names, scopes and outputs are as they were. `weights` is the file of weights, by default the one
    beside the graph. It is mapped into memory: it must not be truncated while the graph is in use,
    but may be replaced or deleted.

    Raises:
        InvalidModelError: a file is missing, damaged, of a newer format, or of another graph.
        InvalidGraphError, LimitExceededError: the graph breaks a rule or a limit.
        ConfigurationError: safetensors is needed and not installed.
    """
    source = Path(path)
    beside = weights_path(source) if weights is None else Path(weights)
    data = b""
    try:
        data = _read(source)
        frozen = decode_graph_file(data)
    except HeliographError as error:
        advice = _OF_WEIGHTS if _has_weights(source, data) else error.advice
        raise error_of(error, f"{source}: {error.message}", advice) from None
    return thaw(frozen, read_weights(beside, frozen) if contents(frozen) else {})


def _has_weights(path: Path, data: bytes) -> bool:
    """Return whether a file that is no graph file seems to hold a model's weights."""
    return path.exists() and (data.startswith(b"GGUF") or path.suffix in (".gguf", WEIGHTS_SUFFIX))


def weights_path(path: Path) -> Path:
    """The path of a graph file's weights. Raises InvalidArgumentError."""
    if path.suffix == WEIGHTS_SUFFIX:
        raise InvalidArgumentError(
            f"{path} is where weights go, and they go beside the graph", advice=f"name a file {SUFFIX}"
        )
    if not path.name:
        raise InvalidArgumentError(f"{str(path)!r} is no file", advice="such as 'model.hgraph'")
    return path.with_suffix(WEIGHTS_SUFFIX)


def _read(path: Path) -> bytes:
    """Read a graph file, and at most one byte more than allowed. Raises InvalidModelError."""
    advice = "name a file that hg.save wrote"
    try:
        # Reading a pipe could block, and a device has no end.
        if not path.is_file() and path.exists():
            raise InvalidModelError("is no plain file", advice=advice)
        with path.open("rb") as file:
            return file.read(min(os.fstat(file.fileno()).st_size, MAX_FILE_BYTES) + 1)
    except OSError as error:
        raise InvalidModelError(f"cannot be read: {error.strerror}", advice=advice) from None
