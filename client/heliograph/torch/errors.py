"""Errors of lowering, which name the node and the line of the module that it comes from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.fx

import heliograph as hg

#: The most characters of a name that an error shows.
_SHOWN = 80
#: Files of torch and of Heliograph, whose lines say less than those that call them.
INNER = (str(Path(torch.__file__).parent), str(Path(hg.__file__).parent))
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def source_of(node: torch.fx.Node) -> str:
    """Return the innermost line outside of torch that a node comes from; empty if it is unknown."""
    return line_of(node.meta.get("stack_trace") or "")


def line_of(trace: str) -> str:
    """Return the innermost line of a traceback outside of torch, or of torch if there is none."""
    found = [(one["file"], one["line"], one["function"]) for one in _LINE.finditer(trace)]
    # Code that torch generates has no lines that anyone can look at.
    found = [one for one in found if not one[0].startswith("<eval_with_key>")]
    outside = [one for one in found if not one[0].startswith(INNER)]
    if not found:
        return ""
    file, line, function = (outside or found)[-1]
    return f"{file}:{line} in {function}"


def op_of(node: torch.fx.Node) -> str:
    """Return the name of a node's op, such as "aten.add.Tensor"."""
    target: Any = node.target
    return str(target) if not callable(target) or hasattr(target, "_schema") else target.__name__


def label(node: torch.fx.Node) -> str:
    """Describe a node: its name, its op, and the line that it comes from."""
    source = source_of(node)
    where = f", {source}" if source else ""
    return f"node {node.name[:_SHOWN]!r} ({op_of(node)[:_SHOWN]}{where})"


def refusal(node: torch.fx.Node, why: str, advice: str = "") -> hg.UnsupportedError:
    """Return the error for a node that cannot be expressed."""
    return hg.UnsupportedError(
        f"{label(node)}: {why}",
        advice=advice or "hg.torch.supported(module, example_inputs) lists all such nodes",
    )
