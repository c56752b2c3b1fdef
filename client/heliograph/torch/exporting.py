"""`hg.torch.export`: tracing a module by torch.export, to Core ATen."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.fx

import heliograph as hg
from heliograph.torch import errors
from heliograph.torch.model import Model
from heliograph.torch.rules import ACTIVATIONS

#: Which dimensions of which inputs vary, as {"x": {0: "batch"}}; True: all.
Dynamic: TypeAlias = "Mapping[str, Any] | Sequence[Any] | bool | None"
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


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of ATen's ops to those that have rules."""
    table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions())
    whole = {f"aten::{name}" for name in (*_WHOLE, *ACTIVATIONS)}
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
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    args, options = _distinct((args, dict(example_options or {})))
    program = traced(module, args, options, dynamic, trace_hooks=trace_hooks)
    given = _bound(module, args, options)
    return Model(program, _names(given, args, options, dynamic), inspect.signature(module.forward))


def traced(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    options: dict[str, Any],
    dynamic: Dynamic = None,
    *,
    trace_hooks: bool = False,
) -> torch.export.ExportedProgram:
    """Return a module in Core ATen. Raises UnsupportedError and InvalidArgumentError."""
    # Tracing needs no gradients, and warns of what does not matter here.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exported(module, args, options, dynamic, trace_hooks=trace_hooks)
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
    shapes = _dynamic_shapes(_bound(module, args, options), dynamic)
    try:
        return torch.export.export(module, args, options, dynamic_shapes=shapes)
    except hg.HeliographError:
        raise
    except Exception as error:
        raise refusal_of(error) from error


def _distinct(example: Any) -> Any:
    """Return an example in which no tensor is there twice: torch.export would take one input for
    both."""
    seen: set[int] = set()

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            return tensor
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return torch.utils._pytree.tree_map_only(torch.Tensor, other, example)


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


def refusal_of(error: Exception) -> hg.HeliographError:
    """Return what a failed trace means."""
    text = str(error)
    line = errors.line_of(text) or _raised_at(error)
    where = f", {line}" if line else ""
    is_data = any(one.__name__.startswith("GuardOnDataDependent") for one in type(error).__mro__)
    if is_data or "data-dependent" in text:
        return hg.UnsupportedError(
            f"control flow depends on data{where}: {_first(text)}",
            advice="compute both ways and choose with torch.where, or use torch.compile, which "
            "breaks the graph there",
        )
    return hg.UnsupportedError(
        f"torch.export cannot trace the module{where}: {_first(text)}",
        advice="torch.export.draft_export(module, example_inputs) reports more",
    )


def _raised_at(error: Exception) -> str:
    """Return the line of the module's code in a traceback; empty if there is none."""
    line = errors.line_of("".join(traceback.format_tb(error.__traceback__)))
    return "" if line.startswith(errors.INNER) else line


def _first(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason is given"


# Dynamic dimensions


def _dynamic_shapes(given: dict[str, Any], dynamic: Dynamic) -> Any:
    """Return `dynamic` as torch.export has it."""
    if dynamic is None or dynamic is False:
        return None
    if dynamic is True:
        return torch.utils._pytree.tree_map(_all_dynamic, given)
    if not isinstance(dynamic, Mapping):
        return _with_dims(dynamic)
    if unknown := [name for name in dynamic if name not in given]:
        raise hg.InvalidArgumentError(
            f"dynamic: there is no argument {unknown[0]!r:.80}",
            advice=f"arguments of forward: {', '.join(given):.300}",
        )
    static = torch.utils._pytree.tree_map(lambda _: None, given)
    return {**static, **_with_dims(dynamic)}


def _bound(module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of `forward`."""
    try:
        return dict(inspect.signature(module.forward).bind(*args, **options).arguments)
    except TypeError as error:
        raise hg.InvalidArgumentError(
            f"the example inputs do not fit forward: {error}",
            advice="give them as a call of the module has them",
        ) from None


def _all_dynamic(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return None
    return {axis: torch.export.Dim.AUTO for axis, size in enumerate(leaf.shape) if size > 1}


def _with_dims(spec: Any) -> Any:
    """Replace names of dimensions by torch's mark of a dynamic one."""
    if isinstance(spec, str):
        return torch.export.Dim.DYNAMIC
    if isinstance(spec, Mapping):
        return {key: _with_dims(one) for key, one in spec.items()}
    if isinstance(spec, (list, tuple)):
        return type(spec)(_with_dims(one) for one in spec)
    return spec


def _names(
    given: dict[str, Any], args: tuple[Any, ...], options: dict[str, Any], dynamic: Dynamic
) -> list[dict[int, str]]:
    """Return the names of dynamic dimensions, by axis, for each leaf of the example inputs."""
    specs: Any = () if isinstance(dynamic, bool) or dynamic is None else dynamic
    if isinstance(specs, Mapping):
        specs = [specs.get(name) for name in given]
    found: dict[int, dict[int, str]] = {}
    for one, spec in zip(given.values(), specs, strict=False):
        _collect(one, spec, found)
    return [found.get(id(leaf), {}) for leaf in torch.utils._pytree.tree_leaves((args, options))]


def _collect(leaf: Any, spec: Any, found: dict[int, dict[int, str]]) -> None:
    if isinstance(leaf, torch.Tensor):
        pairs = spec.items() if isinstance(spec, Mapping) else enumerate(spec or ())
        found[id(leaf)] = {axis: _name_of(dim) for axis, dim in pairs if _name_of(dim)}
    elif isinstance(leaf, Mapping) and isinstance(spec, Mapping):
        for key, one in leaf.items():
            _collect(one, spec.get(key), found)
    elif isinstance(leaf, (list, tuple)) and isinstance(spec, (list, tuple)):
        for one, inner in zip(leaf, spec, strict=False):
            _collect(one, inner, found)


def _name_of(dim: Any) -> str:
    """Return the name of a dimension, also of torch's object; empty if it has none."""
    return dim if isinstance(dim, str) else getattr(dim, "__name__", "")
