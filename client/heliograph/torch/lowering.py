"""Lowering: an FX graph of ATen's ops becomes nodes of a graph.

The items of the walk are values of the graph, tensors that are known before a run, and Python's
numbers. A node whose inputs are all known is computed by torch itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import heliograph as hg
from heliograph.lowerings.arrays import cast
from heliograph.lowerings.names import Names
from heliograph.torch import ops
from heliograph.torch.elements import dtype_name, plain
from heliograph.torch.errors import label, refusal, source_of
from heliograph.torch.node import Node
from heliograph.torch.rules import MUTABLE, RANDOM, REFUSED, Rule, find

assert ops

#: The meaning of a node of an FX graph: a value, a tensor of the host, a number, or several.
Item: TypeAlias = Any
#: The name of the input that decides the random numbers of a run.
SEED = "random_seed"
#: The most elements of a tensor that is computed on the host.
MOST_FOLDED = 2**24
#: The most nodes of an FX graph.
MOST_NODES = 200_000
#: Constants of more elements are weights, which are uploaded once by their content.
_SMALL = 64
#: Python's functions of sizes, which a graph with dynamic shapes computes.
_SIZES: frozenset[Callable[..., Any]] = frozenset(
    {
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.truediv,
        operator.mod,
        operator.pow,
        operator.neg,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
        operator.and_,
        operator.or_,
        operator.not_,
        math.ceil,
        math.floor,
        math.trunc,
        math.sqrt,
        torch.sym_max,
        torch.sym_min,
        torch.sym_not,
        torch.sym_float,
        torch.sym_int,
        torch.sym_ite,
        torch.sym_sum,
    }
)
#: Checks that a traced graph repeats; the shapes of a graph here are known, so they hold or it fails.
_CHECKS = frozenset(
    {
        "_assert_async",
        "_assert_scalar",
        "_assert_tensor_metadata",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    }
)
#: Questions about sizes.
_QUESTIONS = frozenset(
    {"is_contiguous", "sym_is_contiguous", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride"}
)


class Lowering:
    """The state of lowering FX graphs into one graph.

    `seed`: the value (i64) that decides the random numbers of a run. Without it, a module with
    random ops adds an input of the name `SEED`.
    """

    def __init__(self, graph: hg.Graph, seed: hg.Value | None = None) -> None:
        self.graph = graph
        self._seed = seed
        self._randoms = 0
        #: Values of constants, by the identity of their tensor, which is kept.
        self._lifted: dict[int, tuple[torch.Tensor, hg.Value]] = {}
        self._known: dict[int, torch.Tensor] = {}
        self._names = Names()

    def weight(self, name: str, tensor: torch.Tensor) -> hg.Value:
        """Add a tensor as a weight; the same tensor is added once, however many names it has."""
        if id(tensor) not in self._lifted:
            self._note(tensor, self.graph.weight(self._names.free(name), plain(tensor)))
        return self._lifted[id(tensor)][1]

    def _note(self, tensor: torch.Tensor, value: hg.Value) -> None:
        self._lifted[id(tensor)] = (tensor, value)
        self._known[value.reference] = tensor

    def lift(self, tensor: torch.Tensor) -> hg.Value:
        """Return a constant as a value of the graph, the same for the same tensor."""
        if id(tensor) in self._lifted:
            return self._lifted[id(tensor)][1]
        if (fill := _uniform(tensor)) is not None:
            value = self.graph.full(tuple(tensor.shape), fill, dtype_name(tensor.dtype))
        elif tensor.numel() > _SMALL:
            return self.weight("constant", tensor)
        else:
            value = self.graph.constant(plain(tensor))
        self._note(tensor, value)
        return value

    def known(self, value: hg.Value) -> torch.Tensor | None:
        """Return the elements of a weight or constant, or None."""
        return self._known.get(value.reference)

    def random(self, shape: tuple[int, ...], dtype: str) -> hg.Value:
        """Return random numbers of the run's seed, others for each call."""
        assert self._seed is not None
        counter = self.graph.full((), self._randoms, "i64")
        self._randoms += 1
        return hg.ops.philox(self._seed, counter, shape=shape, dtype=dtype)

    def run(self, module: torch.fx.GraphModule, inputs: Sequence[Item]) -> list[Item]:
        """Add the nodes of a module to the graph, and return its outputs.

        `inputs`: for each placeholder in order a value, a tensor, a number, or None. Raises
        UnsupportedError, naming the node.
        """
        nodes = list(module.graph.nodes)
        if len(nodes) > MOST_NODES:
            raise hg.UnsupportedError(f"the module has {len(nodes):,} nodes; {MOST_NODES:,} are the most")
        if self._seed is None and any(map(_is_random, nodes)):
            self._seed = self.graph.input(SEED, (), "i64")
        items: dict[torch.fx.Node, Item] = {}
        given = iter(inputs)
        for node in nodes:
            if node.op == "placeholder":
                items[node] = next(given)
            elif node.op == "get_attr":
                items[node] = _attribute(module, str(node.target))
            elif node.op == "call_function":
                items[node] = self._call(node, items)
            elif node.op == "output":
                results = torch.fx.node.map_arg(node.args[0], items.__getitem__)
                return list(results) if isinstance(results, (list, tuple)) else [results]
            else:
                raise refusal(node, f"{node.op} is not part of Core ATen")
        raise hg.InvalidModelError("the module's graph has no output")

    # One node

    def _call(self, node: torch.fx.Node, items: Mapping[torch.fx.Node, Item]) -> Item:
        args, options = torch.fx.node.map_arg((node.args, node.kwargs), items.__getitem__)
        target: Any = node.target
        if target is operator.getitem or target in _SIZES:
            return _on_the_host(node, target, args, options)
        if not isinstance(target, torch._ops.OpOverload):
            raise refusal(node, _no_rule(target))
        name = target._schema.name.rpartition("::")[2]
        if name in _CHECKS:
            return None
        if name in _QUESTIONS:
            return _answer(node, name, args)
        if target._schema.is_mutable and "out" not in target._overloadname:
            raise refusal(node, *MUTABLE)
        values = [one for one in _flat((args, options)) if isinstance(one, hg.Value)]
        if not values and name not in RANDOM and _is_small(node):
            return target(*args, **options)
        if name in REFUSED:
            raise refusal(node, *REFUSED[name])
        found = find(target)
        if found is None:
            raise refusal(node, _no_rule(target))
        with self.graph.built_at(source_of(node)):
            return self._by_rule(node, found, _complete(target, args, options))

    def _by_rule(self, node: torch.fx.Node, rule: Rule, arguments: Sequence[Item]) -> Item:
        given = arguments if rule.host else [self._lifted_all(one) for one in arguments]
        name = node.name
        with self.graph.scope(name) if name.isprintable() else nullcontext():
            try:
                result = rule.function(Node(node, self.graph, self), *given)
            except hg.UnsupportedError as error:
                raise error if error.message.startswith("node ") else refusal(node, error.message) from None
            except hg.InvalidGraphError as error:
                raise refusal(node, error.message) from error
            except TypeError as error:
                raise refusal(node, f"an argument must be known before a run: {error}") from error
        return _typed(node, result)

    def _lifted_all(self, item: Item) -> Item:
        if isinstance(item, torch.Tensor):
            return self.lift(item)
        if isinstance(item, (list, tuple)):
            return [self._lifted_all(one) for one in item]
        return item


def _on_the_host(node: torch.fx.Node, target: Any, args: Sequence[Item], options: Mapping[str, Item]) -> Item:
    """Apply one of Python's functions; operators also serve numbers that a run computes."""
    is_computed = any(isinstance(one, hg.Value) for one in args)
    if is_computed and target.__module__ not in ("_operator", "operator"):
        raise refusal(node, "a size depends on what a run computes")
    return target(*args, **options)


def _is_random(node: torch.fx.Node) -> bool:
    target: Any = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.rpartition("::")[2] in RANDOM


def _no_rule(target: Any) -> str:
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "control flow and other functions of functions are not part of a graph"
    return "there is no rule for this op"


def _attribute(module: torch.fx.GraphModule, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _flat(item: Item) -> Iterable[Item]:
    if isinstance(item, (list, tuple)):
        for one in item:
            yield from _flat(one)
    elif isinstance(item, dict):
        yield from _flat(list(item.values()))
    else:
        yield item


def _complete(target: torch._ops.OpOverload, args: Sequence[Item], options: Mapping[str, Item]) -> list[Item]:
    """The arguments in the order of the schema, with its defaults."""
    found = list(args)
    for argument in target._schema.arguments[len(args) :]:
        found.append(options.get(argument.name, argument.default_value))
    return found


def _answer(node: torch.fx.Node, name: str, args: Sequence[Item]) -> Item:
    x = args[0]
    if name == "sym_size":
        return x.shape[args[1]]
    if name == "sym_numel":
        return math.prod(x.shape)
    found: Any = node.meta["val"]
    if isinstance(found, (bool, int)):
        return found
    raise refusal(node, "strides with dynamic shapes are not known")


def _is_small(node: torch.fx.Node) -> bool:
    """True if the results of a node are small enough to be computed on the host."""
    return all(
        math.prod(int(size) if isinstance(size, int) else 1 for size in one.shape) <= MOST_FOLDED
        for one in _flat(node.meta.get("val"))
        if isinstance(one, torch.Tensor)
    )


def _uniform(tensor: torch.Tensor) -> bool | int | float | None:
    """The element that fills a tensor, where it is one that `Graph.full` takes."""
    if not tensor.numel() or tensor.is_complex():
        return None
    flat = tensor.detach().reshape(-1)
    first = flat[0]
    if tensor.numel() > 1 and not bool((flat == first).all()):
        return None
    number: bool | int | float = first.item()
    return None if isinstance(number, int) and number >= 2**63 else number


def _typed(node: torch.fx.Node, result: Item) -> Item:
    """The results in the data types that torch gives them, with its shapes checked."""
    expected = node.meta.get("val")
    if isinstance(result, (list, tuple)):
        wanted = list(expected) if isinstance(expected, (list, tuple)) else [None] * len(result)
        return [_one_typed(node, one, of) for one, of in zip(result, wanted, strict=False)]
    return _one_typed(node, result, expected)


def _one_typed(node: torch.fx.Node, result: Item, expected: Any) -> Item:
    if not isinstance(result, hg.Value) or not isinstance(expected, torch.Tensor):
        return result
    shape = tuple(expected.shape)
    if all(isinstance(size, int) for size in shape) and shape != result.shape:
        raise hg.InternalError(f"{label(node)} has shape {result.shape} here, and {shape} in torch")
    return cast(result, dtype_name(expected.dtype))


def missing_of(node: torch.fx.Node) -> str:
    """Return why a node cannot be lowered, as far as its op tells; empty if it can."""
    target: Any = node.target
    if node.op in ("placeholder", "get_attr", "output") or target is operator.getitem or target in _SIZES:
        return ""
    if not isinstance(target, torch._ops.OpOverload):
        # A check of an op that is refused itself has no line of its own.
        is_check = getattr(target, "__name__", "") == "with_effects" and "_linalg_check" in str(node.args[1])
        return "" if is_check else _no_rule(target)
    name = target._schema.name.rpartition("::")[2]
    if name in _CHECKS or name in _QUESTIONS:
        return ""
    if name in REFUSED:
        return REFUSED[name][0]
    if target._schema.is_mutable and "out" not in target._overloadname:
        return MUTABLE[0]
    if any(
        free_unbacked_symbols(one) for one in _flat(node.meta.get("val")) if isinstance(one, torch.Tensor)
    ):
        return "the shape of its result depends on what a run computes"
    is_source = not any(isinstance(one, torch.fx.Node) for one in _flat((node.args, node.kwargs)))
    if find(target) or (is_source and name not in RANDOM):
        return ""
    return _no_rule(target)
