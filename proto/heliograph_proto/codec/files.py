"""The format of graph files: a header, and the graph as a message of the contract. See
v1/file.proto.

A file is untrusted input: its digest and its graph are checked before use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from google.protobuf.message import DecodeError

from heliograph_proto import __version__
from heliograph_proto.codec.graphs import decode_graph, graph_bytes
from heliograph_proto.digests import DIGEST_BYTES
from heliograph_proto.errors import HeliographError, InvalidModelError, LimitExceededError, UnknownOpError
from heliograph_proto.graph import Graph, LeafKind, validate
from heliograph_proto.sessions import Limits
from heliograph_proto.v1 import file_pb2

MAGIC = "heliograph graph"
#: The format that this version writes, and the newest one that it reads.
FORMAT = 1

#: The maximum size of a graph file.
MAX_FILE_BYTES = Limits().graph_bytes

_AGAIN = "copy the file again, or save the graph again"
_NEWER = "update heliograph, or save the graph with this version"


def encode_graph_file(graph: Graph) -> bytes:
    """Encode a graph file; equal graphs give equal bytes.

    Raises InvalidGraphError for a graph that no server would accept, LimitExceededError.
    """
    content = graph_bytes(_checked(graph))
    made = file_pb2.GraphFile(
        magic=MAGIC,
        version=FORMAT,
        producer=f"heliograph/{__version__}",
        graph=content,
        digest=hashlib.sha256(content).digest(),
    )
    _check_bytes(made.ByteSize())
    return made.SerializeToString(deterministic=True)


def decode_graph_file(data: bytes) -> Graph:
    """Decode and validate the graph of a file.

    Raises InvalidModelError, LimitExceededError, InvalidGraphError, UnknownOpError (a newer
    version's op).
    """
    _check_bytes(len(data))
    message = _header(data)
    if hashlib.sha256(message.graph).digest() != message.digest:
        raise InvalidModelError("the graph does not match the digest in its file", advice=_AGAIN)
    try:
        return _graph(message.graph)
    except UnknownOpError as error:
        raise error_of(error, f"{error.message}; {message.producer!r:.80} wrote it", _NEWER) from None
    except HeliographError as error:
        raise error_of(error, error.message, error.advice or _AGAIN) from None


def _check_bytes(size_bytes: int) -> None:
    if size_bytes > MAX_FILE_BYTES:
        raise LimitExceededError(
            f"a graph file has at most {MAX_FILE_BYTES:,} bytes, the limit of a request to a server",
            advice="split the graph; weights are in a file of their own and do not count",
        )


def error_of(error: HeliographError, message: str, advice: str) -> HeliographError:
    """Return an error of the same type and origin with another message and advice."""
    return type(error)(message, advice=advice, origin=error.origin)


def _header(data: bytes) -> file_pb2.GraphFile:
    try:
        message = file_pb2.GraphFile.FromString(data)
    except DecodeError:
        raise InvalidModelError("this is not a graph file, or it is truncated", advice=_AGAIN) from None
    if message.magic != MAGIC:
        raise InvalidModelError(
            "this is not a graph file", advice="name a file that hg.save wrote, such as model.hgraph"
        )
    if not 1 <= message.version <= FORMAT:
        raise InvalidModelError(
            f"the graph file has format {message.version}, by {message.producer!r:.80}; this version reads "
            f"up to {FORMAT}",
            advice=_NEWER,
        )
    return message


def _graph(content: bytes) -> Graph:
    try:
        graph = decode_graph(content, Limits())
    except DecodeError:
        raise InvalidModelError("the graph in the file cannot be decoded", advice=_AGAIN) from None
    return _checked(graph)


def _checked(graph: Graph) -> Graph:
    """Validate a graph; weights without a digest are bound to tensors when it is compiled.

    In files alone variables may have digests: those of their first elements.
    """
    first = {leaf.name: leaf.digest for leaf in graph.variables if len(leaf.digest) == DIGEST_BYTES}
    bound = [
        number for number, leaf in enumerate(graph.leaves) if leaf.kind is LeafKind.WEIGHT and not leaf.digest
    ]
    found = validate(_with_first(graph, dict.fromkeys(first, b"")), Limits(), bound)
    return _with_first(found, first)


def _with_first(graph: Graph, digests: Mapping[str, bytes]) -> Graph:
    """Return the graph with these digests of its variables' first elements, by name."""
    leaves = tuple(
        replace(leaf, digest=digests[leaf.name])
        if leaf.kind is LeafKind.VARIABLE and leaf.name in digests
        else leaf
        for leaf in graph.leaves
    )
    return replace(graph, leaves=leaves) if digests else graph
