"""A module and its loss as one graph of ATen's ops: alone, or with the gradients of parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
import torch.utils._pytree as pytree
from torch.nn.attention import SDPBackend, sdpa_kernel

import heliograph as hg
from heliograph.torch.errors import refusal, refusal_of
from heliograph.torch.exporting import decompositions, exported, traced
from heliograph.torch.lowering import missing_of
from heliograph.torch.rules import REFUSED


class WithLoss(torch.nn.Module):  # type: ignore[misc]
    """A module, and a function of its output and of the last arguments."""

    def __init__(self, module: torch.nn.Module, loss: Any, targets: int) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self.targets = targets

    def forward(self, *batch: Any, **named: Any) -> Any:
        """Return the loss of a batch."""
        last = len(batch) - self.targets
        output = self.module(*batch[:last], **named)
        return output if self.loss is None else self.loss(output, *batch[last:])


class Alone(torch.nn.Module):  # type: ignore[misc]
    """A module under the same name as in `WithLoss`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the module's output."""
        return self.module(*inputs, **named)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The meaning of a placeholder of a graph: the first of these that is not None."""

    #: A parameter or buffer, by its name.
    stored: str | None = None
    #: A tensor of the batch, by its number.
    place: int | None = None
    #: A constant: a tensor, a number or None.
    value: Any = None


@dataclass(frozen=True, slots=True)
class Step:
    """A graph of a batch, with what its placeholders and results are."""

    graph: torch.fx.GraphModule
    leaves: tuple[Leaf, ...]
    #: Buffers that it changes. Their new values are the first results.
    changed: tuple[str, ...] = ()
    #: Parameters whose gradients are the last results.
    trained: tuple[str, ...] = ()
    #: The structure of its results in between; None for the loss alone.
    structure: Any = None


def forward_step(module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Step:
    """Trace a module without gradients. Raises UnsupportedError and InvalidArgumentError."""
    program = traced(module, args, named)
    for spec in program.graph_signature.output_specs:
        if spec.kind.name not in ("USER_OUTPUT", "LOSS_OUTPUT"):
            raise hg.UnsupportedError(
                f"the module changes {spec.target!r:.80} also in the mode for evaluation",
                advice="change buffers only where self.training is true",
            )
    return Step(
        program.graph_module, _leaves(program, _names_of(module)), structure=program.call_spec.out_spec
    )


def training_step(
    module: WithLoss, args: tuple[Any, ...], named: dict[str, Any], trainable: frozenset[str]
) -> Step:
    """Trace a module, its loss, and the gradients of those of the parameters that get one.

    Raises UnsupportedError, and InvalidArgumentError for a loss that is no scalar or has no
    gradient.
    """
    with _quiet(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        program = exported(module, args, named)
        _check_loss(program)
        leaves = _leaves(program, _names_of(module))
        stored = _stored_of(program, leaves)
        batch = [one for one in pytree.tree_leaves((args, named)) if isinstance(one, torch.Tensor)]
        try:
            return _joint(program, leaves, stored, batch, trainable)
        except hg.HeliographError:
            raise
        except Exception as error:
            raise refusal_of(error) from error


def refused_line(
    module: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> hg.UnsupportedError | None:
    """Return the error for the first node of a module that cannot be expressed, with its line.

    The nodes of joint graphs do not have the lines of the module. None: all nodes can.
    """
    for node in traced(module, args, named).graph.nodes:
        if reason := missing_of(node):
            return refusal(node, reason, dict(REFUSED.values()).get(reason, ""))
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _check_loss(program: torch.export.ExportedProgram) -> None:
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    results = [
        node
        for node, spec in zip(output.args[0], program.graph_signature.output_specs, strict=True)
        if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")
    ]
    value = results[0].meta.get("val") if len(results) == 1 and hasattr(results[0], "meta") else None
    if not isinstance(value, torch.Tensor):
        raise hg.InvalidArgumentError(
            f"the loss gives {len(results)} results; it is to be one tensor of one element",
            advice="give a function of the module's output: Trainer(module, lambda out, y: ..., optimizer)",
        )
    if value.numel() != 1 or not value.is_floating_point():
        raise hg.InvalidArgumentError(
            f"the loss is no scalar: it has shape {list(value.shape)} and {value.dtype}",
            advice="reduce it, as loss.mean() does",
        )


def _names_of(module: torch.nn.Module) -> dict[str, str]:
    """One name for all names of a parameter or buffer that several modules share."""
    first: dict[int, str] = {}
    found = {}
    for listed in (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in listed:
            found[name] = first.setdefault(id(tensor), name)
    return found


def _leaves(program: torch.export.ExportedProgram, names: Mapping[str, str]) -> tuple[Leaf, ...]:
    found = []
    tensors = 0
    for spec in program.graph_signature.input_specs:
        kind, target = spec.kind.name, str(spec.target)
        if kind in ("PARAMETER", "BUFFER"):
            found.append(Leaf(stored=names.get(target, target)))
        elif kind == "USER_INPUT" and type(spec.arg).__name__ == "TensorArgument":
            found.append(Leaf(place=tensors))
            tensors += 1
        elif kind == "USER_INPUT":
            found.append(Leaf(value=getattr(spec.arg, "value", None)))
        elif kind == "CONSTANT_TENSOR":
            found.append(Leaf(value=program.constants[target]))
        else:
            raise hg.UnsupportedError(f"the module has an input of kind {kind.lower()}, {target!r:.80}")
    return tuple(found)


def _stored_of(program: torch.export.ExportedProgram, leaves: Sequence[Leaf]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for spec, leaf in zip(program.graph_signature.input_specs, leaves, strict=True):
        if leaf.stored is not None and leaf.stored not in found:
            tensor = program.state_dict.get(str(spec.target))
            found[leaf.stored] = program.constants[str(spec.target)] if tensor is None else tensor
    return found


# Gradients


class _Flat(torch.nn.Module):  # type: ignore[misc]
    """A traced graph as a module of its own, in which every parameter and buffer is there once."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        leaves: Sequence[Leaf],
        stored: Mapping[str, torch.Tensor],
        trained: Sequence[str],
    ) -> None:
        super().__init__()
        self._graph = torch.fx.Interpreter(program.graph_module)
        self._leaves = leaves
        self._places: dict[str, str] = {}
        for number, (name, tensor) in enumerate(stored.items()):
            self._places[name] = f"stored_{number}"
            if name in trained:
                self.register_parameter(f"stored_{number}", torch.nn.Parameter(tensor.detach()))
            else:
                self.register_buffer(f"stored_{number}", tensor.detach())

    def names(self, places: Sequence[str]) -> tuple[str, ...]:
        """Return the names of parameters or buffers by those that they have here."""
        by_place = {place: name for name, place in self._places.items()}
        return tuple(by_place[place] for place in places)

    def forward(self, *batch: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the loss."""
        given = [
            getattr(self, self._places[leaf.stored])
            if leaf.stored is not None
            else leaf.value
            if leaf.place is None
            else batch[leaf.place]
            for leaf in self._leaves
        ]
        return (self._graph.run(*given)[-1].reshape(()),)


def _joint(
    program: torch.export.ExportedProgram,
    leaves: Sequence[Leaf],
    stored: Mapping[str, torch.Tensor],
    batch: Sequence[torch.Tensor],
    trainable: frozenset[str],
) -> Step:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {name: mode.from_tensor(tensor.detach()) for name, tensor in stored.items()}
    inputs = [mode.from_tensor(one.detach()) for one in batch]
    wanted = [name for name in fakes if name in trainable]
    with mode:
        wanted = _reached(_Flat(program, leaves, fakes, wanted), wanted, inputs)
        flat = _Flat(program, leaves, fakes, wanted)
        graph, signature = _joint_graph(flat, inputs)
    place = {f"stored_{number}": name for number, name in enumerate(stored)}
    given = iter(range(len(inputs)))
    placeholders = [
        Leaf(stored=place[name]) if name is not None else Leaf(place=next(given))
        for name in (
            signature.inputs_to_parameters.get(node.name) or signature.inputs_to_buffers.get(node.name)
            for node in graph.graph.nodes
            if node.op == "placeholder"
        )
    ]
    by_gradient = signature.backward_signature.gradients_to_parameters
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    names = [getattr(node, "name", None) for node in output.args[0]]
    changed = [place[target] for target in signature.buffers_to_mutate.values()]
    first = len(changed) + 1
    trained = [place[by_gradient[name]] for name in names[first:]]
    return Step(graph, tuple(placeholders), tuple(changed), tuple(trained))


def _reached(flat: _Flat, names: Sequence[str], batch: Sequence[torch.Tensor]) -> list[str]:
    """Return those of the parameters that the loss depends on."""
    parameters = dict(flat.named_parameters())
    with torch.enable_grad():
        (loss,) = flat(*batch)
        gradients: Sequence[Any] = ()
        if parameters and loss.requires_grad:
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    found = [
        flat.names([place])[0] for place, one in zip(parameters, gradients, strict=False) if one is not None
    ]
    if not found:
        raise hg.InvalidArgumentError(
            "no parameter of the optimizer has a gradient of this loss",
            advice="let the loss depend on them, with requires_grad, outside of torch.no_grad()",
        )
    return [name for name in names if name in found]


def _joint_graph(flat: _Flat, batch: Sequence[torch.Tensor]) -> tuple[torch.fx.GraphModule, Any]:
    """Return AOTAutograd's joint graph of the first result and its gradients.

    The one place that calls what torch does not promise to keep: torch.export has no public form of
    joint graphs.
    """
    from torch._functorch.aot_autograd import aot_export_module

    with torch.enable_grad(), torch.fx.traceback.preserve_node_meta():
        graph, signature = aot_export_module(
            flat, list(batch), trace_joint=True, output_loss_index=0, decompositions=decompositions()
        )
    graph.graph.eliminate_dead_code()
    return graph, signature
