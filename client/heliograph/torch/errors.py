"""Errors of lowering, which name the node and the line of the module that it comes from."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.fx

import heliograph as hg

#: The most characters of a name that an error shows.
_SHOWN = 80
#: The most characters of torch's reason that an error shows.
_REASON = 800
#: Files of torch and of Heliograph, whose lines say less than those that call them.
INNER = (str(Path(torch.__file__).parent), str(Path(hg.__file__).parent))
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def source_of(node: torch.fx.Node) -> str:
    """Return the innermost line outside of torch that a node comes from; empty if it is unknown.

    A line of torch itself comes with the name of the part of the module.
    """
    line = line_of(node.meta.get("stack_trace") or "")
    parts = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values() if path]
    return f"module {parts[-1]!r:.80}, {line}" if parts and line.startswith(INNER) else line


def line_of(trace: str) -> str:
    """Return the innermost line of a traceback outside of torch, or of torch if there is none."""
    found = [(one["file"], one["line"], one["function"]) for one in _LINE.finditer(trace)]
    # Code that torch generates has no lines that anyone can look at.
    found = [one for one in found if not one[0].startswith("<")]
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


# Failed traces

#: How lines begin that torch adds to the cause of an error; those after them say no more.
_NOISE = (
    "Caused by: (",
    "For C++ stack trace",
    "For extended logs",
    "For more ",
    "If you suspect",
    "The error above occurred",
    "The following call raised this error",
    "consider using data-dependent friendly APIs",
)
#: How the names of torch's errors begin that control flow by data raises.
_OF_DATA = ("DataDependentOutput", "DynamicOutputShape", "GuardOnDataDependent")
_INLINE = re.compile(r"For more information, run with \S+")
_UNKNOWN_TYPE = re.compile(r"<class '(?P<type>[^']+)'> in output, which is not a known type")


def refusal_of(error: Exception) -> hg.HeliographError:
    """Return what a failed trace means."""
    text = str(error)
    line = line_of(text) or _raised_at(error)
    where = f", {line}" if line else ""
    if found := _UNKNOWN_TYPE.search(text):
        name = found["type"].rpartition(".")[2]
        return hg.UnsupportedError(
            f"the module returns an object of {name:.80}, which torch.export does not know{where}",
            advice="return tensors, tuples and dictionaries, or register the class: "
            "torch.export.register_dataclass",
        )
    is_data = any(one.__name__.startswith(_OF_DATA) for one in type(error).__mro__)
    if is_data or "data-dependent" in text:
        return hg.UnsupportedError(
            f"control flow depends on data{where}: {_reason(text)}",
            advice="compute both ways and choose with torch.where, or use torch.compile, which "
            "breaks the graph there",
        )
    if "Constraints violated" in text:
        return hg.InvalidArgumentError(
            f"dynamic: {_reason(text)}", advice="leave out of `dynamic` what the module takes as a constant"
        )
    return hg.UnsupportedError(
        f"torch.export cannot trace the module{where}: {type(error).__name__}: {_reason(text)}",
        advice="call the module itself with the example inputs: it may raise the same; "
        "torch.export.draft_export(module, example_inputs) reports more",
    )


def _raised_at(error: Exception) -> str:
    """Return the line of the module's code in a traceback; empty if there is none."""
    line = line_of("".join(traceback.format_tb(error.__traceback__)))
    return "" if line.startswith(INNER) else line


def _reason(text: str) -> str:
    """Return the lines that tell the cause."""
    lines = [_INLINE.sub("", line).strip() for line in text.splitlines()]
    ends = (place for place, line in enumerate(lines) if place and line.startswith(_NOISE))
    cause = " ".join(line for line in lines[: next(ends, None)] if line)
    return cause[:_REASON] or "no reason is given"
