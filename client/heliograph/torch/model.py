"""`Model`: an exported module, its inputs and outputs, and graphs of it by shapes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

import heliograph as hg
from heliograph.lowerings.importers import check_options, check_session
from heliograph.torch.calls import CallForm
from heliograph.torch.elements import dtype_name, torch_dtype
from heliograph.torch.lowering import SEED, Item, Lowering
from heliograph.torch.plans import Program, TorchPlan

Shapes = Mapping[str, Sequence[int] | int]


@dataclass(frozen=True, slots=True)
class Argument:
    """An input or output of a model."""

    name: str
    #: The name of its data type, such as "f32".
    dtype: str
    #: Sizes; a name is a dimension whose size varies.
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class _Input:
    """A tensor that a run takes."""

    argument: Argument
    #: The sizes as torch has them; expressions of symbols among them.
    sizes: tuple[Any, ...]


class Model:
    """An exported module. Made by `hg.torch.export`; any number of sessions can compile it.

    It shares the memory of the module's parameters and buffers. A graph has the elements that they
    have when it is compiled.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        names: Sequence[Mapping[int, str]],
        signature: inspect.Signature,
    ) -> None:
        self._program = program
        self._nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        self._specs = list(program.graph_signature.input_specs)
        _refuse_mutations(program)
        #: The names of symbols.
        self._symbols: dict[Any, str] = {}
        self._inputs: dict[str, _Input] = {}
        leaves = [pair for pair in zip(self._nodes, self._specs, strict=True) if _is_user_input(pair[1])]
        for (node, spec), axes in zip(leaves, [*names, *[{}] * len(leaves)], strict=False):
            if isinstance(node.meta.get("val"), torch.Tensor):
                self._add_input(str(spec.arg.name), node.meta["val"], axes)
        #: Results before the module's own, which order its checks.
        self._tokens = sum(one.kind.name == "TOKEN" for one in program.graph_signature.output_specs)
        self._outputs = self._named_outputs()
        fixed = {
            str(spec.arg.name): spec.arg.value
            for _, spec in leaves
            if isinstance(spec.arg, torch.export.graph_signature.ConstantArgument)
        }
        #: How calls become inputs.
        self._calls = CallForm(
            signature, program.call_spec, [str(spec.arg.name) for _, spec in leaves], fixed
        )

    def __repr__(self) -> str:
        return f"<Model ({', '.join(self._inputs):.80}) -> ({', '.join(self._outputs):.80})>"

    @property
    def program(self) -> torch.export.ExportedProgram:
        """The module as torch.export gave it, in Core ATen."""
        return self._program

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """The tensors that a run takes."""
        return tuple(one.argument for one in self._inputs.values())

    @property
    def outputs(self) -> tuple[Argument, ...]:
        """The tensors that a run gives."""
        found = []
        for name, node in self._outputs.items():
            value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
            if isinstance(value, torch.Tensor):
                found.append(Argument(name, dtype_name(value.dtype), self._shape_text(value.shape)))
        return tuple(found)

    def graph(self, shapes: Shapes | None = None) -> hg.Graph:
        """Return the model as a graph for inputs of these shapes; see `compile`."""
        return self.lower(self.declared(shapes or {})).graph

    def compile(self, session: hg.Session, shapes: Shapes | None = None, **options: Any) -> TorchPlan:
        """Compile the model for a session.

        Where all shapes are known, the plan is made now, and the weights are uploaded. Otherwise
        the first run with inputs of some shapes makes the plan for them.

        Args:
            shapes: Sizes of dynamic dimensions by name, as {"batch": 8}, or shapes by the input's
                name.
            options: Arguments of `session.compile`, such as devices and memory.

        Raises UnsupportedError, naming the node and its line, InvalidArgumentError for shapes that
        are not known and for an unknown option, and the errors of `session.compile`.
        """
        check_session(session, "model.compile()")
        check_options(options)
        plan = TorchPlan(self, session, dict(options))
        if shapes or not self._symbols:
            plan.prepare(self.declared(shapes or {}))
        return plan

    # For plans

    def declared(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all inputs. Raises InvalidArgumentError where one is not known."""
        symbols = set(self._symbols.values())
        if wrong := [name for name in shapes if name not in self._inputs and name not in symbols]:
            known = ", ".join((*self._inputs, *sorted(symbols)))
            raise hg.InvalidArgumentError(
                f"there is no input or dimension {wrong[0]!r:.80}", advice=f"there are: {known:.400}"
            )
        sizes = {
            name: int(size) for name, size in shapes.items() if name in symbols and isinstance(size, int)
        }
        for name, given in shapes.items():
            if name in self._inputs:
                self._bind(name, (given,) if isinstance(given, int) else tuple(given), sizes)
        found = {}
        for name, one in self._inputs.items():
            shape = [self._size(size, sizes) for size in one.sizes]
            if None in shape:
                raise hg.InvalidArgumentError(
                    f"the shape of input {name!r:.80} is not known: {one.argument.shape}",
                    advice="give the sizes of its dynamic dimensions, or its shape",
                )
            found[name] = tuple(size for size in shape if size is not None)
        return found

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check the shapes of a run's inputs. Raises InvalidInputError."""
        sizes: dict[str, int] = {}
        try:
            for name in self._inputs:
                self._bind(name, shapes[name], sizes)
            for name, one in self._inputs.items():
                for size, given in zip(one.sizes, shapes[name], strict=True):
                    if self._size(size, sizes) not in (given, None):
                        raise self._misfit(name, shapes[name])
        except hg.InvalidArgumentError as error:
            raise hg.InvalidInputError(error.message, advice=error.advice) from None
        self._check_ranges(sizes)

    def dtype(self, name: str) -> torch.dtype:
        """Return torch's data type of an input."""
        return torch_dtype(self._inputs[name].argument.dtype)

    def bound(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors of a call of the module by the names of the inputs.

        Raises InvalidInputError.
        """
        found = self._calls.inputs(args, named)
        return {name: found[name] for name in self._inputs}

    def restored(self, results: Sequence[Any]) -> Any:
        """Return the results in the structure that the module's forward gives."""
        return self._calls.restored(results)

    def lower(self, shapes: Mapping[str, tuple[int, ...]]) -> Program:
        """Make a graph for inputs of these shapes. Raises UnsupportedError."""
        graph = hg.Graph()
        lowering = Lowering(graph)
        seen: dict[Any, Item] = {}
        items: list[Item] = []
        for node, spec in zip(self._nodes, self._specs, strict=True):
            if node.name in self._inputs:
                argument = self._inputs[node.name].argument
                items.append(graph.input(argument.name, shapes[argument.name], argument.dtype))
            elif spec.target is not None:
                items.append(self._stored(spec, lowering, seen))
            else:
                items.append(getattr(spec.arg, "value", None))
        results = lowering.run(self._program.graph_module, items)
        outputs: dict[str, Any] = {}
        for name, result in zip(self._outputs, results[self._tokens :], strict=True):
            if isinstance(result, hg.Value):
                graph.output(name, result)
                outputs[name] = name
            else:
                outputs[name] = result
        return Program(graph, outputs, frozenset(graph.outputs), SEED in graph.inputs)

    # Inputs

    def _add_input(self, name: str, value: torch.Tensor, axes: Mapping[int, str]) -> None:
        sizes = tuple(map(_size_of, value.shape))
        for axis, size in enumerate(sizes):
            if not isinstance(size, int) and size.is_symbol:
                self._symbols.setdefault(size, axes.get(axis, f"{name}_{axis}"))
        argument = Argument(name, dtype_name(value.dtype), self._shape_text(value.shape))
        self._inputs[name] = _Input(argument, sizes)

    def _shape_text(self, shape: Sequence[Any]) -> tuple[int | str, ...]:
        sizes = map(_size_of, shape)
        return tuple(one if isinstance(one, int) else self._size_text(one) for one in sizes)

    def _size_text(self, size: Any) -> str:
        found = self._symbols.get(size)
        if found is not None:
            return found
        return re.sub(r"\w+", lambda one: self._by_text.get(one[0], one[0]), str(size))

    @property
    def _by_text(self) -> dict[str, str]:
        return {str(symbol): name for symbol, name in self._symbols.items()}

    def _bind(self, name: str, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
        """Take the sizes of symbols from an input's shape. Raises InvalidArgumentError."""
        wanted = self._inputs[name].sizes
        if len(shape) != len(wanted):
            raise self._misfit(name, shape)
        for size, given in zip(wanted, shape, strict=True):
            if isinstance(size, int):
                fits = size == given
            else:
                symbol = self._symbols.get(size)
                fits = symbol is None or sizes.setdefault(symbol, int(given)) == given
            if not fits:
                raise self._misfit(name, shape)

    def _misfit(self, name: str, shape: Sequence[int]) -> hg.InvalidArgumentError:
        declared = self._inputs[name].argument.shape
        return hg.InvalidArgumentError(
            f"input {name!r:.80} has shape {list(declared)}, and {list(shape)} is given",
            advice="sizes that vary are named when the module is exported: dynamic={'x': {0: 'batch'}}",
        )

    def _size(self, size: Any, sizes: Mapping[str, int]) -> int | None:
        """Return a size for these of the symbols; None if it is not known."""
        if isinstance(size, int):
            return size
        known = {symbol: sizes[name] for symbol, name in self._symbols.items() if name in sizes}
        found = size.subs(known)
        return int(found) if found.is_number else None

    def _check_ranges(self, sizes: Mapping[str, int]) -> None:
        for symbol, name in self._symbols.items():
            allowed = self._program.range_constraints.get(symbol)
            if allowed is None or name not in sizes:
                continue
            # Tracing takes sizes for 2 or more; what it found also holds for 0 and 1.
            low, high = (0 if allowed.lower == 2 else allowed.lower), allowed.upper
            if not low <= sizes[name] <= high:
                raise hg.InvalidInputError(
                    f"{name!r:.80} is {sizes[name]}, and the module takes {low} to {high}"
                )

    # Weights and outputs

    def _stored(self, spec: Any, lowering: Lowering, seen: dict[Any, Item]) -> Item:
        """Return a parameter, buffer or constant as an item; one of several names is added once."""
        program, target = self._program, str(spec.target)
        tensor = program.state_dict.get(target)
        tensor = program.constants[target] if tensor is None else tensor
        if spec.kind.name not in ("PARAMETER", "BUFFER"):
            return tensor
        if tensor.is_meta:
            raise hg.UnsupportedError(
                f"weight {target!r:.80} is on the device 'meta', and has no elements",
                advice="load the weights before the module is exported",
            )
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in seen or not tensor.numel():
            if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
                raise hg.InvalidModelError(
                    f"weight {target!r:.80} has elements that are NaN", advice="load or initialize it"
                )
            seen[key] = lowering.weight(target, tensor)
        return seen[key]

    def _named_outputs(self) -> dict[str, Any]:
        """The nodes of the results by the names of the outputs."""
        (output,) = (node for node in self._program.graph.nodes if node.op == "output")
        results = output.args[0][self._tokens :]
        spec = self._program.call_spec.out_spec
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(len(results))), spec))
        found: dict[str, Any] = {}
        for (path, _), node in zip(paths, results, strict=True):
            name = "_".join(
                ["output"] * (not path or not hasattr(path[0], "key")) + [_step(one) for one in path]
            )
            while name in found:
                name += "_"
            found[name] = node
        return found


def _size_of(size: Any) -> Any:
    """Return a size of torch's as a number, or as an expression of symbols."""
    if isinstance(size, int):
        return size
    found = size.node.expr
    return int(found) if found.is_number else found


def _step(part: Any) -> str:
    for kind in ("key", "name", "idx"):
        if hasattr(part, kind):
            return re.sub(r"\W+", "_", str(getattr(part, kind))) or "output"
    return "output"


def _is_user_input(spec: Any) -> bool:
    return bool(spec.kind.name == "USER_INPUT")


def mutations_of(program: torch.export.ExportedProgram) -> list[tuple[str, str]]:
    """Return the names of the buffers and inputs that a run changes, and why that is refused."""
    return [
        (str(spec.target), f"the module changes it in a run ({spec.kind.name.lower().replace('_', ' ')})")
        for spec in program.graph_signature.output_specs
        if spec.kind.name not in ("USER_OUTPUT", "LOSS_OUTPUT", "TOKEN")
    ]


def _refuse_mutations(program: torch.export.ExportedProgram) -> None:
    """Check that the module changes nothing. Raises UnsupportedError."""
    for name, reason in mutations_of(program):
        raise hg.UnsupportedError(
            f"{name!r:.80}: {reason}",
            advice="call module.eval() first, so that statistics stay; and write to no input or buffer",
        )
