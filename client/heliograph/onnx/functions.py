"""Bodies of ops: an op without a rule, or a model's own function, is replaced by its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import AttributeProto, FunctionProto, NodeProto, TypeProto, defs, helper

from heliograph.onnx.elements import Bounded, Coded, Item, Maps, element_of

Functions = Mapping[tuple[str, str], FunctionProto]


def body_of(
    node: NodeProto, items: Sequence[Item], functions: Functions, opsets: Mapping[str, int]
) -> FunctionProto | None:
    """Return the function that a node calls, or None: the model's own, else that of ONNX's op."""
    own = functions.get((node.domain, node.op_type))
    return own if own is not None else _of_schema(node, items, opsets)


def has_body(node: NodeProto, functions: Functions, opsets: Mapping[str, int]) -> bool:
    """True if the op of a node has a body, whatever its inputs are."""
    if (node.domain, node.op_type) in functions:
        return True
    schema = _schema(node, opsets)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def _schema(node: NodeProto, opsets: Mapping[str, int]) -> Any:
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        return defs.get_schema(node.op_type, opsets.get(node.domain, 1), domain)
    except defs.SchemaError:
        return None


def _of_schema(node: NodeProto, items: Sequence[Item], opsets: Mapping[str, int]) -> FunctionProto | None:
    schema = _schema(node, opsets)
    if schema is None:
        return None
    if schema.has_function:
        return with_defaults(schema.function_body, schema)
    if not schema.has_context_dependent_function:
        return None
    opset = opsets.get(node.domain, 1)
    usable = [one for one in schema.context_dependent_function_opset_versions if one <= opset]
    types = [type_of(item).SerializeToString() for item in items]
    made = schema.get_context_dependent_function_with_opset_version(
        max(usable, default=schema.since_version), node.SerializeToString(), types
    )
    found = FunctionProto()
    found.ParseFromString(made)
    return with_defaults(found, schema) if found.node else None


def with_defaults(function: FunctionProto, schema: Any) -> FunctionProto:
    """Return a copy of a body with the defaults of the op's attributes."""
    made = FunctionProto()
    made.CopyFrom(function)
    known = {one.name for one in made.attribute_proto}
    for name, attribute in schema.attributes.items():
        default = attribute.default_value
        if name not in known and default is not None and default.name:
            made.attribute_proto.append(default)
    return made


def type_of(item: Item) -> TypeProto:
    """Return ONNX's type of an item; an empty one of nothing."""
    if item is None:
        return TypeProto()
    if isinstance(item, list):
        inner = type_of(item[0]) if item else helper.make_tensor_type_proto(1, None)
        return helper.make_sequence_type_proto(inner)
    if isinstance(item, Bounded):
        return helper.make_tensor_type_proto(element_of(item), [None] * item.value.ndim)
    if isinstance(item, Maps):
        return TypeProto()
    shape = item.codes.shape if isinstance(item, Coded) else item.shape
    return helper.make_tensor_type_proto(element_of(item), list(shape))


def attributes_of(call: NodeProto, function: FunctionProto) -> dict[str, AttributeProto]:
    """Return the attributes that a call of a function binds: its own, else the defaults."""
    found = {one.name: one for one in function.attribute_proto}
    found.update({one.name: one for one in call.attribute})
    return found


def bound(node: NodeProto, attributes: Mapping[str, AttributeProto]) -> NodeProto:
    """Return a node of a function's body with its references to attributes replaced."""
    if not any(one.ref_attr_name or one.HasField("g") or one.graphs for one in node.attribute):
        return node
    made = NodeProto()
    made.CopyFrom(node)
    del made.attribute[:]
    for one in node.attribute:
        if not one.ref_attr_name:
            made.attribute.append(_bound_graphs(one, attributes))
        elif one.ref_attr_name in attributes:
            replaced = made.attribute.add()
            replaced.CopyFrom(attributes[one.ref_attr_name])
            replaced.name = one.name
    return made


def _bound_graphs(one: AttributeProto, attributes: Mapping[str, AttributeProto]) -> AttributeProto:
    made = AttributeProto()
    made.CopyFrom(one)
    for graph in ([made.g] if made.HasField("g") else []) + list(made.graphs):
        nodes = [bound(node, attributes) for node in graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
    return made
