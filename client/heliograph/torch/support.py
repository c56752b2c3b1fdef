"""`hg.torch.supported`: which nodes of a module cannot be run, before anything is uploaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heliograph.torch.dynamic import Dynamic
from heliograph.torch.errors import op_of, source_of
from heliograph.torch.exporting import example_of, traced
from heliograph.torch.lowering import missing_of
from heliograph.torch.model import mutations_of


@dataclass(frozen=True, slots=True)
class Missing:
    """A node that cannot be run."""

    node: str
    op: str
    reason: str
    #: The line of the module that it comes from; empty if it is unknown.
    source: str

    def __str__(self) -> str:
        where = f", {self.source}" if self.source else ""
        return f"{self.op} {self.node!r}{where}: {self.reason}"


def supported(
    module: torch.nn.Module,
    example_inputs: Sequence[Any] | torch.Tensor,
    example_options: Mapping[str, Any] | None = None,
    *,
    dynamic: Dynamic = None,
    trace_hooks: bool = False,
) -> tuple[Missing, ...]:
    """Return the nodes of a module that cannot be run; empty if all can.

    The arguments are those of `export`. It looks at ops: a node that it does not name may still be
    refused for its types, or for a size that a run computes. Raises the errors of `export`.
    """
    args, options = example_of(example_inputs, example_options)
    program = traced(module, args, options, dynamic, trace_hooks=trace_hooks, may_drop=False)
    found = [Missing(name, "output", reason, "") for name, reason in mutations_of(program)]
    for node in program.graph.nodes:
        if reason := missing_of(node):
            found.append(Missing(node.name, op_of(node), reason, source_of(node)))
    return tuple(found)
