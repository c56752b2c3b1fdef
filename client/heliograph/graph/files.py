"""`hg.save` and `hg.load`: graphs in files.

    hg.save(graph, "model.hgraph")          # and model.safetensors beside it, if there are weights
    graph = hg.load("model.hgraph")

A graph file (v1/file.proto) has a header and the graph as it goes over the wire. Its weights are a
safetensors file (see `_weights`), which other programs can read. What is loaded is checked as if it came
from the wire: digests, the rules of the op table, limits.
"""

from __future__ import annotations

import os
from pathlib import Path

from heliograph.graph.atomic_files import replacing
from heliograph.graph.builder import Graph
from heliograph.graph.frozen import thaw
from heliograph.graph.server_weights import check_here
from heliograph.graph.weight_files import contents, read_weights, write_weights
from heliograph_proto.codec.files import MAX_FILE_BYTES, decode_graph_file, encode_graph_file, error_of
from heliograph_proto.errors import HeliographError, InvalidArgumentError, InvalidModelError

#: The usual suffix of a graph file, and that of its weights.
SUFFIX = ".hgraph"
WEIGHTS_SUFFIX = ".safetensors"


def save(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Writes a graph to a file, and its weights to one beside it: model.hgraph, model.safetensors.

    Each file is replaced whole, the weights first; the same graph gives the same bytes. Weights are
    written from where they are, without a copy.

    Raises InvalidGraphError (a graph that no server would take, such as one without outputs),
    LimitExceededError, InvalidArgumentError when a file cannot be written, or weights of somebody else are
    there, ConfigurationError when there are weights and safetensors is not installed.
    """
    if not isinstance(graph, Graph):
        raise InvalidArgumentError(f"{graph!r:.80} is no graph", advice="hg.save(graph, 'model.hgraph')")
    check_here(graph)
    target, frozen = Path(path), graph._freeze()
    beside = weights_path(target)
    data = encode_graph_file(frozen)
    if contents(frozen):
        write_weights(beside, frozen, graph._contents())
    with replacing(target) as part:
        part.write_bytes(data)


def load(path: str | os.PathLike[str], *, weights: str | os.PathLike[str] | None = None) -> Graph:
    """The graph in a file, to compile or to go on building; names, scopes and outputs are as they were.

    `weights`: where they are, unless beside the graph. They are mapped into memory, so that the file must
    not be cut while the graph is in use; it may be replaced or deleted.

    Raises InvalidModelError for files that are missing, damaged, of a newer format, or do not fit together;
    InvalidGraphError, LimitExceededError; ConfigurationError when safetensors is needed and not installed.
    """
    source = Path(path)
    beside = weights_path(source) if weights is None else Path(weights)
    try:
        frozen = decode_graph_file(_read(source))
    except HeliographError as error:
        raise error_of(error, f"{source}: {error.message}", error.advice) from None
    return thaw(frozen, read_weights(beside, frozen) if contents(frozen) else {})


def weights_path(path: Path) -> Path:
    """Where the weights of a graph file lie. Raises InvalidArgumentError."""
    if path.suffix == WEIGHTS_SUFFIX:
        raise InvalidArgumentError(
            f"{path} is where weights go, and they go beside the graph", advice=f"name a file {SUFFIX}"
        )
    if not path.name:
        raise InvalidArgumentError(f"{str(path)!r} is no file", advice="such as 'model.hgraph'")
    return path.with_suffix(WEIGHTS_SUFFIX)


def _read(path: Path) -> bytes:
    """A graph file's bytes, or one more than there may be. Raises InvalidModelError."""
    advice = "name a file that hg.save wrote"
    try:
        # A pipe could keep us waiting, and a device has no end.
        if not path.is_file() and path.exists():
            raise InvalidModelError("is no plain file", advice=advice)
        with path.open("rb") as file:
            return file.read(min(os.fstat(file.fileno()).st_size, MAX_FILE_BYTES) + 1)
    except OSError as error:
        raise InvalidModelError(f"cannot be read: {error.strerror}", advice=advice) from None
