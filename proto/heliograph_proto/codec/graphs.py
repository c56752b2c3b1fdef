"""Graphs and op queries as messages.

Models repeat their layers, so most nodes have the op, attributes and result type of an earlier one:
its form. Protobuf encodes and decodes each form once; the rest of an element, such as its operands
and its name, is joined to it and cut off again as bytes. The bytes are those that protobuf writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from heliograph_proto.codec import wire
from heliograph_proto.codec.inline_forms import varint
from heliograph_proto.codec.types import decode_dtype, decode_type, encode_type
from heliograph_proto.devices import OpQuery
from heliograph_proto.errors import InvalidGraphError, LimitExceededError
from heliograph_proto.graph import Graph, Leaf, LeafKind, Node, Output
from heliograph_proto.ops.table import infer
from heliograph_proto.pace import in_turns
from heliograph_proto.plans import ReceivedGraph
from heliograph_proto.sessions import Limits
from heliograph_proto.types import DType, TensorType
from heliograph_proto.v1 import device_pb2, graph_pb2, tensor_pb2

_LEAF_KINDS = {
    LeafKind.INPUT: graph_pb2.LEAF_KIND_INPUT,
    LeafKind.WEIGHT: graph_pb2.LEAF_KIND_WEIGHT,
    LeafKind.VARIABLE: graph_pb2.LEAF_KIND_VARIABLE,
}
_LEAF_KINDS_BACK = {number: kind for kind, number in _LEAF_KINDS.items()}

#: The tags of the lists of a Graph, and of those fields of a Node and of a Leaf that are not part
#: of its form.
_LEAVES, _NODES, _OUTPUTS = 0x0A, 0x12, 0x1A
_OPERANDS, _OPERAND, _NODE_NAME = 0x12, 0x10, 0x2A
_DIGEST, _LEAF_NAME = 0x22, 0x12

#: The maximum operands, attributes and dimensions together, for each node that a graph may have.
PARTS_PER_NODE = 64
#: The maximum bytes of a node, a leaf or an output.
_MOST_BYTES = 64 * 1024


def encode_graph(graph: Graph) -> graph_pb2.Graph:
    return graph_pb2.Graph.FromString(graph_bytes(graph))


def graph_bytes(graph: Graph) -> bytes:
    """Return the encoding of a graph. Raises TypeError or ValueError if a message cannot hold
    it."""
    outputs = (graph_pb2.Output(name=one.name, value=one.value) for one in graph.outputs)
    return b"".join(
        [
            *[_field(_LEAVES, data) for data in _leaves(graph.leaves)],
            *[_field(_NODES, data) for data in _nodes(graph.nodes)],
            *[_field(_OUTPUTS, one.SerializeToString()) for one in outputs],
        ]
    )


def _leaves(leaves: Iterable[Leaf]) -> Iterator[bytes]:
    #: The fields before the name and behind it.
    forms: dict[tuple[LeafKind, TensorType], tuple[bytes, bytes]] = {}
    for leaf in leaves:
        key = leaf.kind, leaf.type
        if (form := forms.get(key)) is None:
            kind, type = graph_pb2.Leaf(kind=_LEAF_KINDS[leaf.kind]), encode_type(leaf.type)
            form = forms[key] = kind.SerializeToString(), graph_pb2.Leaf(type=type).SerializeToString()
        name = _field(_LEAF_NAME, leaf.name.encode()) if leaf.name else b""
        yield form[0] + name + form[1] + (_field(_DIGEST, leaf.digest) if leaf.digest else b"")


def _nodes(nodes: Iterable[Node]) -> Iterator[bytes]:
    #: The fields before the operands and behind them.
    forms: dict[tuple[str, TensorType, str], tuple[bytes, bytes]] = {}
    for node in nodes:
        text = repr(node.attributes) if node.attributes else ""
        if "nan" in text:
            # A text has all bits of a number, except those of a NaN.
            text = f"{id(node.attributes)}"
        key = node.op, node.type, text
        if (form := forms.get(key)) is None:
            behind = graph_pb2.Node(
                attributes=_encode_attributes(node.attributes), result=encode_type(node.type)
            )
            form = forms[key] = graph_pb2.Node(op=node.op).SerializeToString(), behind.SerializeToString()
        operands = _field(_OPERANDS, b"".join(map(varint, node.operands))) if node.operands else b""
        name = _field(_NODE_NAME, node.name.encode()) if node.name else b""
        yield form[0] + operands + form[1] + name


def _field(tag: int, data: bytes) -> bytes:
    return varint(tag) + varint(len(data)) + data


def received_graph(data: bytes, limits: Limits) -> ReceivedGraph:
    """Return an encoded graph under the digest of its bytes, which include its names."""
    return ReceivedGraph(sha256(data).digest(), len(data), lambda: decode_graph(data, limits), data)


def _encode_attributes(attributes: Mapping[str, Any]) -> list[graph_pb2.Attribute]:
    return [_encode_attribute(*item) for item in attributes.items()]


def _encode_attribute(name: str, value: Any) -> graph_pb2.Attribute:
    match value:
        case bool():
            return graph_pb2.Attribute(name=name, boolean=value)
        case int():
            return graph_pb2.Attribute(name=name, integer=value)
        case float():
            return graph_pb2.Attribute(name=name, real=value)
        case DType():
            return graph_pb2.Attribute(name=name, data_type=value.number)
    return graph_pb2.Attribute(name=name, integers=graph_pb2.IntegerList(values=value))


def decode_graph(data: bytes, limits: Limits) -> Graph:
    """Decode a graph, unvalidated.

    Raises LimitExceededError for one of too many parts before it takes much memory,
    InvalidGraphError or InvalidArgumentError for what a Graph cannot express, and DecodeError.
    """
    decoder = _Decoder(data, limits)
    try:
        for tag, _, start, end in in_turns(wire.fields(data)):
            decoder.add(tag, start, end)
    except (IndexError, UnicodeDecodeError):
        raise DecodeError("a field is cut off, or a name is no text") from None
    return decoder.graph()


class _Form(NamedTuple):
    """The common part of several nodes."""

    op: str
    type: TensorType
    attributes: Mapping[str, Any]
    #: The number of its attributes, their numbers, and its dimensions.
    parts: int


class _Decoder:
    """The parts of a graph that were decoded so far."""

    def __init__(self, data: bytes, limits: Limits) -> None:
        self._data = data
        self._limits = limits
        self._leaves: list[Leaf] = []
        self._nodes: list[Node] = []
        self._outputs: list[Output] = []
        self._forms: dict[bytes, _Form] = {}
        #: The bytes of a form behind its first field, the op, of the last node that had this field.
        self._rests: dict[bytes, int] = {}
        self._leaf_forms: dict[bytes, tuple[LeafKind, TensorType]] = {}
        #: Equal types are one object. Found by their bytes: clients could choose dimensions with
        #: one hash.
        self._types: dict[bytes, TensorType] = {}
        self._parts_left = PARTS_PER_NODE * limits.graph_nodes

    def graph(self) -> Graph:
        return Graph(tuple(self._leaves), tuple(self._nodes), tuple(self._outputs))

    def add(self, tag: int, start: int, end: int) -> None:
        """Add a field of the graph whose value lies there."""
        if tag == _NODES:
            self._add_node(start, end)
        elif tag == _LEAVES:
            self._add_leaf(start, end)
        elif tag == _OUTPUTS:
            self._check_room(self._outputs, "outputs", end - start)
            found = graph_pb2.Output.FromString(self._data[start:end])
            self._outputs.append(Output(found.name, found.value))
        else:
            self._count(1)

    def _add_node(self, start: int, end: int) -> None:
        if end - start > _MOST_BYTES or len(self._nodes) >= self._limits.graph_nodes:
            self._check_room(self._nodes, "nodes", end - start)
        (op, type, attributes, parts), packed, name = self._alike(start, end) or self._node(start, end)
        operands = tuple(packed) if packed.isascii() else _numbers(packed)
        self._parts_left -= parts + len(operands)
        if self._parts_left < 0:
            self._count(0)
        self._nodes.append(Node(op, operands, type, attributes, name.decode()))

    def _node(self, start: int, end: int) -> tuple[_Form, bytes, bytes]:
        """Return a node's form, operands and name, and keep how many bytes its form has behind the
        op."""
        form, packed, name = _cut(self._data, start, end, _OPERANDS, _NODE_NAME)
        if len(form) > 1 and form[0] & 0x87 == 2 and form[1] < 0x80:
            op = form[: 2 + form[1]]
            self._rests[op] = len(form) - len(op)
        return self._forms.get(form) or self._form(form), packed, name

    def _alike(self, start: int, end: int) -> tuple[_Form, bytes, bytes] | None:
        """Return the same of a node whose fields are as long as those of the last one of its op,
        and in the order of their numbers, and whose form is known; else None.

        A known form is a row of whole fields without operands and name, and its first one is the
        op. So the bytes behind the operands are whole fields too.
        """
        data = self._data
        if end - start < 2:
            return None
        first = start + 2 + data[start + 1]
        op = data[start:first]
        rest = self._rests.get(op)
        if rest is None or first + 2 > end or data[first] != _OPERANDS or data[first + 1] > 0x7F:
            return None
        begin = first + 2
        behind = begin + data[first + 1]
        stop = behind + rest
        form = self._forms.get(op + data[behind:stop])
        if form is None:
            return None
        # Nothing follows, or a name does, and ends there.
        size = end - stop - 2
        if size == -2 or (0 <= size < 0x80 and data[stop] == _NODE_NAME and data[stop + 1] == size):
            return form, data[begin:behind], data[stop + 2 : end]
        return None

    def _add_leaf(self, start: int, end: int) -> None:
        self._check_room(self._leaves, "leaves", end - start)
        form, digest, name = _cut(self._data, start, end, _DIGEST, _LEAF_NAME)
        kind, type = self._leaf_forms.get(form) or self._leaf_form(form, name)
        self._count(type.ndim)
        self._leaves.append(Leaf(kind, name.decode(), type, digest))

    def _form(self, data: bytes) -> _Form:
        found = graph_pb2.Node.FromString(data)
        numbers = sum([1 + len(one.integers.values) for one in found.attributes])
        type = self._type(found.result)
        form = _Form(
            found.op,
            type,
            _decode_attributes(found.op, found.attributes),
            numbers + type.ndim,
        )
        self._forms[data] = form
        return form

    def _leaf_form(self, data: bytes, name: bytes) -> tuple[LeafKind, TensorType]:
        found = graph_pb2.Leaf.FromString(data)
        if found.kind not in _LEAF_KINDS_BACK:
            raise InvalidGraphError(f"leaf {name.decode()[:40]!r} has no known kind")
        form = self._leaf_forms[data] = _LEAF_KINDS_BACK[found.kind], self._type(found.type)
        return form

    def _type(self, message: tensor_pb2.TensorType) -> TensorType:
        data = message.SerializeToString()
        type = self._types.get(data)
        if type is None:
            type = self._types[data] = decode_type(message)
        return type

    def _count(self, parts: int) -> None:
        self._parts_left -= parts
        if self._parts_left < 0:
            raise LimitExceededError(
                f"the graph has more than {PARTS_PER_NODE * self._limits.graph_nodes:,} operands, attributes "
                "and dimensions",
                advice="split the graph",
            )

    def _check_room(self, found: Sequence[object], what: str, size_bytes: int) -> None:
        if len(found) >= self._limits.graph_nodes:
            raise LimitExceededError(
                f"the graph has more than {self._limits.graph_nodes:,} {what}, the server's limit",
                advice="split the graph, or raise the limit in the server's configuration",
            )
        if size_bytes > _MOST_BYTES:
            raise LimitExceededError(
                f"the graph has {what} of {size_bytes:,} bytes; one has at most {_MOST_BYTES:,}",
                advice="are its names, operands or attributes what they should be?",
            )


def _cut(data: bytes, place: int, end: int, joined: int, last: int) -> tuple[bytes, bytes, bytes]:
    """Cut an element into its form, its values with the tag `joined`, and its last one with the tag
    `last`. Raises DecodeError, IndexError."""
    form, values, found = list[bytes](), list[bytes](), b""
    begin = place
    while place < end:
        tag, value = data[place], place + 2
        stop = value + data[place + 1]
        if tag & 0x87 != 2 or stop > value + 0x7F:
            tag, value, stop = wire.field_at(data, place)
        if stop > end:
            raise DecodeError("a field is cut off")
        if tag == joined or (tag == _OPERAND and joined == _OPERANDS):
            form.append(data[begin:place])
            values.append(data[value:stop])
            begin = stop
        elif tag == last:
            form.append(data[begin:place])
            found = data[value:stop]
            begin = stop
        place = stop
    form.append(data[begin:end])
    return b"".join(form), b"".join(values), found


def _numbers(data: bytes) -> tuple[int, ...]:
    """Return packed numbers. Raises DecodeError."""
    found = []
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            found.append(value)
            value = shift = 0
        elif (shift := shift + 7) > 63:
            raise DecodeError("a number has more than 64 bits")
    if shift:
        raise DecodeError("a number is cut off")
    return tuple(found)


def _decode_attributes(op: str, messages: Iterable[graph_pb2.Attribute]) -> dict[str, Any]:
    """Raise InvalidGraphError or InvalidArgumentError."""
    attributes: dict[str, Any] = {}
    for one in messages:
        if one.name in attributes:
            raise InvalidGraphError(f"op {op[:40]!r} has attribute {one.name[:40]!r} twice")
        match one.WhichOneof("value"):
            case "integers":
                attributes[one.name] = tuple(one.integers.values)
            case "data_type":
                attributes[one.name] = decode_dtype(one.data_type)
            case "real" | "integer" | "boolean" as field:
                attributes[one.name] = getattr(one, field)
            case _:
                raise InvalidGraphError(f"op {op[:40]!r}: {one.name[:40]!r} has no value")
    return attributes


def encode_queries(device: str, queries: Sequence[OpQuery]) -> device_pb2.QueryOpsRequest:
    return device_pb2.QueryOpsRequest(
        device=device,
        queries=[
            device_pb2.OpQuery(
                op=one.op,
                attributes=_encode_attributes(one.attributes),
                operands=map(encode_type, one.operands),
                op_path=one.op_path,
            )
            for one in queries
        ],
    )


def decode_query(message: device_pb2.OpQuery) -> OpQuery:
    """Decode a query and infer its result. Raises the errors of `infer`."""
    operands = tuple(map(decode_type, message.operands))
    attributes = _decode_attributes(message.op, message.attributes)
    result, complete = infer(message.op, operands, attributes)
    return OpQuery(message.op, operands, result, complete, message.op_path)
