"""`hg.torch.export`: tracing a module by torch.export, to Core ATen."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
import torch.utils._pytree as pytree

import heliograph as hg
from heliograph.torch.calls import shown
from heliograph.torch.dynamic import Dynamic, DynamicShapes
from heliograph.torch.errors import label, refusal_of
from heliograph.torch.model import Model
from heliograph.torch.rules import ACTIVATIONS

#: Ops that stay whole, because a graph here expresses them in fewer nodes.
_WHOLE = (
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_log_softmax_backward_data",
    "_softmax_backward_data",
    "embedding_dense_backward",
    "gelu_backward",
    "native_batch_norm_backward",
    "native_layer_norm_backward",
    "select_backward",
    "slice_backward",
    "threshold_backward",
)

#: Ops that torch can decompose, but does not by default.
_MORE = (
    torch.ops.aten.dist,
    torch.ops.aten.ldexp,
    torch.ops.aten.normal,
)
#: Ops that drop elements of a module in the mode for training.
_DROPOUTS = frozenset(f"aten.{name}dropout.default" for name in ("", "alpha_", "feature_", "feature_alpha_"))


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of ATen's ops to those that have rules."""
    table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions())
    whole = {f"aten::{name}" for name in (*_WHOLE, *ACTIVATIONS)}
    table.update(torch._decomp.get_decompositions(_MORE))
    return {op: function for op, function in table.items() if op.name().partition(".")[0] not in whole}


def export(
    module: torch.nn.Module,
    example_inputs: Sequence[Any] | torch.Tensor,
    example_options: Mapping[str, Any] | None = None,
    *,
    dynamic: Dynamic = None,
    trace_hooks: bool = False,
) -> Model:
    """Trace a module with example inputs, and return it as a model that sessions can compile.

    Args:
        module: A module, in the mode for inference (`module.eval()`).
        example_inputs: The positional arguments of a call; a tensor is the only one.
        example_options: The keyword arguments of a call.
        dynamic: The dimensions whose sizes vary, by the names of the arguments of `forward`:
            `{"x": {0: "batch"}}`. Dimensions of the same name have the same size. True: every
            dimension of every input. Sizes of the examples there must be 2 or more. `dynamic`
            may also be what `torch.export` takes as `dynamic_shapes`.
        trace_hooks: Whether hooks of the module may run. They run once, while it is traced, and
            become a part of the model.

    The model shares the memory of the parameters and buffers. Raises UnsupportedError for control
    flow that depends on data, hooks, and whatever else `torch.export` cannot trace, and
    InvalidArgumentError for example inputs that do not fit.
    """
    args, options = example_of(example_inputs, example_options)
    program = traced(module, args, options, dynamic, trace_hooks=trace_hooks, may_drop=False)
    names = DynamicShapes(_bound(module, args, options), dynamic).names((args, options))
    return Model(program, names, inspect.signature(module.forward))


def example_of(example_inputs: Any, example_options: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as torch.export takes them. Raises InvalidArgumentError."""
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if not isinstance(example_inputs, (tuple, list)):
        raise hg.InvalidArgumentError(
            f"example_inputs is {shown(example_inputs)}, and must be a tensor or a tuple of arguments",
            advice="keyword arguments are apart, and no arguments are (): export(module, (), {'x': x})",
        )
    if not isinstance(example_options, (Mapping, type(None))):
        raise hg.InvalidArgumentError(
            f"example_options is {shown(example_options)}, and must have keyword arguments by name",
            advice="several inputs are a tuple: hg.torch.export(module, (a, b))",
        )
    args, options = _distinct((tuple(example_inputs), dict(example_options or {})))
    return args, options


def traced(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    options: dict[str, Any],
    dynamic: Dynamic = None,
    *,
    trace_hooks: bool = False,
    may_drop: bool = True,
) -> torch.export.ExportedProgram:
    """Return a module in Core ATen. Raises UnsupportedError and InvalidArgumentError.

    `may_drop`: whether a module in the mode for training may have dropout.
    """
    # Tracing needs no gradients, and warns of what does not matter here.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exported(module, args, options, dynamic, trace_hooks=trace_hooks)
        if module.training and not may_drop:
            _refuse_dropout(program)
        try:
            return program.run_decompositions(decompositions())
        except Exception as error:
            raise refusal_of(error) from error


def exported(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    options: dict[str, Any],
    dynamic: Dynamic = None,
    *,
    trace_hooks: bool = False,
) -> torch.export.ExportedProgram:
    """Return a module as torch.export traces it, which can be differentiated.

    Raises UnsupportedError and InvalidArgumentError.
    """
    if not isinstance(module, torch.nn.Module):
        raise hg.InvalidArgumentError(
            f"{type(module).__name__} is no torch.nn.Module", advice="wrap the function in a module"
        )
    if not trace_hooks:
        _refuse_hooks(module)
    args, options = _distinct((args, options))
    given = _bound(module, args, options)
    _check_devices(module, given)
    shapes = DynamicShapes(given, dynamic).spec
    try:
        return torch.export.export(module, args, options, dynamic_shapes=shapes)
    except hg.HeliographError:
        raise
    except Exception as error:
        raise refusal_of(error) from error


def _distinct(example: Any) -> Any:
    """Return an example of other tensors with the same elements.

    torch.export takes one input for a tensor that is there twice, and leaves its marks of dynamic
    dimensions on tensors.
    """

    def other(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, other, example)


def _check_devices(module: torch.nn.Module, given: Mapping[str, Any]) -> None:
    """Check that the inputs are where the weights are. Raises InvalidArgumentError."""
    weights = {one.device: name for name, one in module.named_parameters()}
    for argument, value in given.items():
        for one in pytree.tree_leaves(value):
            if weights and isinstance(one, torch.Tensor) and one.ndim and one.device not in weights:
                device, name = next(iter(weights.items()))
                raise hg.InvalidArgumentError(
                    f"argument {argument!r:.80} is on the device '{one.device}', and the weight {name!r:.80} "
                    f"on '{device}'",
                    advice="move them to one device that has elements: module.to('cpu')",
                )


def _refuse_dropout(program: torch.export.ExportedProgram) -> None:
    """Check that a module drops no elements. Raises UnsupportedError."""
    for node in program.graph.nodes:
        if str(node.target) in _DROPOUTS and node.args[1] and node.args[2]:
            raise hg.UnsupportedError(
                f"{label(node)}: the module is in the mode for training, in which it drops elements",
                advice="call module.eval() first; hg.torch.Trainer trains a module",
            )


def _refuse_hooks(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            for hook in getattr(part, kind, {}).values():
                raise hg.UnsupportedError(
                    f"module {name or type(module).__name__!r:.80} has a hook, {_line_of(hook)}, which would "
                    "run once, while the module is traced",
                    advice="remove it, or let it become a part of the model: trace_hooks=True",
                )


def _line_of(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return type(function).__name__
    return f"{code.co_name} at {code.co_filename}:{code.co_firstlineno}"


def _bound(module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of `forward`."""
    try:
        return dict(inspect.signature(module.forward).bind(*args, **options).arguments)
    except TypeError as error:
        raise hg.InvalidArgumentError(
            f"the example inputs do not fit forward: {error}",
            advice="give them as a call of the module has them",
        ) from None
