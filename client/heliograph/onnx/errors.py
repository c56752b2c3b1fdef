"""Errors of importing, which name the node."""

from __future__ import annotations

from collections.abc import Collection

from onnx import NodeProto

import heliograph as hg

#: The most characters of a name that an error shows.
_SHOWN = 80


class NeedsValue(Exception):
    """A rule needs the elements of a value on the host. It never leaves the package.

    `node`: the node that needs them. `inputs`: the inputs of the graph that decide these elements.
    """

    def __init__(self, node: str, name: str, inputs: Collection[str]) -> None:
        super().__init__(name)
        self.node = node
        self.name = name
        self.inputs = frozenset(inputs)


def label(node: NodeProto) -> str:
    """Describe a node: its op and its name, or its first output where it has none."""
    domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
    name = node.name or next((f"-> {one}" for one in node.output if one), "")
    return f"node {name[:_SHOWN]!r} ({domain[:_SHOWN]}{node.op_type[:_SHOWN]})"


def refusal(node: NodeProto, why: str, advice: str = "") -> hg.UnsupportedError:
    """Return the error for a node that cannot be expressed."""
    return hg.UnsupportedError(
        f"{label(node)}: {why}", advice=advice or "hg.onnx.supported(path) lists all such nodes"
    )


def broken(node: NodeProto, why: str) -> hg.InvalidModelError:
    """Return the error for a node that breaks ONNX's rules."""
    return hg.InvalidModelError(f"{label(node)}: {why}", advice="check the model with onnx.checker")
