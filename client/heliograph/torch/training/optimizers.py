"""Optimizers of torch.optim as parts of a graph: SGD, Adam and AdamW.

`hg.optim` does not serve here: its numbers beside the learning rate are constants of the graph.
A run is given all numbers of each group, so that torch's schedulers work; and the state has
torch's names, forms (amsgrad, dampening, maximize) and order of roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import heliograph as hg
from heliograph.lowerings.arrays import cast

#: The numbers of a group of parameters that a run is given, in this order.
NUMBERS = ("lr", "weight_decay", "first", "second", "eps")
_SUPPORTED = "torch.optim.SGD, Adam and AdamW are supported"
#: Makes a variable of the graph for the state of a parameter: by the name of the state.
Slot = Callable[[str], hg.Value]


@dataclass(frozen=True, slots=True)
class Group:
    """A group of parameters as the graph has it; its numbers are inputs of each run."""

    #: The names of the parameters.
    names: tuple[str, ...]
    kind: str
    #: Options that decide which nodes there are.
    flags: frozenset[str]

    @property
    def slots(self) -> dict[str, str]:
        """Torch's names of the state of each parameter, by those of the variables."""
        if self.kind == "sgd":
            return {"momentum": "momentum_buffer"} if "momentum" in self.flags else {}
        found = {"mean": "exp_avg", "square": "exp_avg_sq"}
        return {**found, "largest": "max_exp_avg_sq"} if "amsgrad" in self.flags else found


def made(optimizer: Any, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer for what `Trainer` is given. Raises InvalidArgumentError."""
    if isinstance(optimizer, str):
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        if optimizer not in kinds:
            raise hg.InvalidArgumentError(
                f"there is no optimizer {optimizer!r:.40}",
                advice=f"{_SUPPORTED}; by name: {', '.join(kinds)}",
            )
        optimizer = kinds[optimizer]
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(module.parameters())
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise hg.InvalidArgumentError(
            f"{type(optimizer).__name__} is no optimizer that runs on a server",
            advice=f"{_SUPPORTED}, as an instance, a function of the parameters, or a name",
        )
    found: torch.optim.Optimizer = optimizer
    return found


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> tuple[Group, ...]:
    """Return the groups of an optimizer.

    `names`: the names of all parameters by their identity. Raises InvalidArgumentError for a
    parameter that has none.
    """
    return tuple(_group(optimizer, one, names) for one in optimizer.param_groups)


def _group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], names: Mapping[int, str]) -> Group:
    listed = []
    for parameter in group["params"]:
        if id(parameter) not in names:
            raise hg.InvalidArgumentError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is none of the module",
                advice="make it of the same module: torch.optim.SGD(module.parameters(), lr=0.1)",
            )
        if parameter.requires_grad:
            listed.append(names[id(parameter)])
    kind = "sgd" if isinstance(optimizer, torch.optim.SGD) else "adam"
    return Group(tuple(listed), kind, flags_of(optimizer, group))


def flags_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> frozenset[str]:
    """Return the options of a group that decide which nodes there are."""
    flags = [one for one in ("nesterov", "amsgrad", "maximize") if group.get(one)]
    flags += [one for one in ("momentum", "weight_decay") if _number(group.get(one, 0.0))]
    if "momentum" in flags and _number(group["dampening"]):
        flags.append("dampening")
    if isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay"):
        flags.append("decoupled")
    return frozenset(flags)


def numbers_of(group: Mapping[str, Any]) -> list[float]:
    """Return the numbers of a group of an optimizer as a run is given them."""
    if "betas" in group:
        first, second = group["betas"]
    else:
        first, second = group["momentum"], group["dampening"]
    return [
        _number(one) for one in (group["lr"], group["weight_decay"], first, second, group.get("eps", 0.0))
    ]


def _number(given: Any) -> float:
    return float(given)


class Update:
    """The step of a group of parameters in a graph.

    `numbers`: the value of a run's numbers, f64. `count`: which step this is, from 1.
    """

    def __init__(self, group: Group, numbers: hg.Value, count: hg.Value) -> None:
        self._group = group
        self._scalars: dict[tuple[str, str], hg.Value] = {}
        self._given = {name: numbers[place] for place, name in enumerate(NUMBERS)}
        if group.kind == "adam":
            self._correct(cast(count, "f64"))
        elif "dampening" in group.flags:
            # The first step takes the whole gradient.
            share = 1.0 - self._given["second"]
            self._given["share"] = hg.where(
                hg.equal(count, 1), hg.full((), 1.0, "f64", graph=share.graph), share
            )

    def _correct(self, count: hg.Value) -> None:
        given = self._given
        # In f64, as Python's numbers: 1 - 0.999 has three digits less in f32.
        first, second = (1.0 - hg.pow(given[name], count) for name in ("first", "second"))
        given["rate"] = given["lr"] / first
        given["root"] = 1.0 / hg.sqrt(second)
        given["rest1"], given["rest2"] = 1.0 - given["first"], 1.0 - given["second"]
        given["kept"] = 1.0 - given["lr"] * given["weight_decay"]

    def _number(self, name: str, like: hg.Value) -> hg.Value:
        key = (name, str(like.dtype))
        if key not in self._scalars:
            self._scalars[key] = cast(self._given[name], like.dtype)
        return self._scalars[key]

    def apply(self, variable: hg.Value, gradient: hg.Value, slot: Slot) -> None:
        """Assign a variable, and the variables of its state, their values after this step."""
        flags = self._group.flags
        wide = "f64" if variable.dtype.name == "f64" else "f32"
        weights, d = cast(variable, wide), cast(gradient, wide)
        if "maximize" in flags:
            d = -d
        if "weight_decay" in flags and "decoupled" not in flags:
            d = d + weights * self._number("weight_decay", weights)
        by_kind = self._descent if self._group.kind == "sgd" else self._adam
        hg.assign(variable, cast(by_kind(weights, d, slot), variable.dtype))

    def _descent(self, weights: hg.Value, d: hg.Value, slot: Slot) -> hg.Value:
        flags = self._group.flags
        if "momentum" in flags:
            factor = self._number("first", d)
            added = d * self._number("share", d) if "dampening" in flags else d
            moved = _kept(slot("momentum"), d, lambda old: old * factor + added)
            d = d + moved * factor if "nesterov" in flags else moved
        return weights - d * self._number("lr", d)

    def _adam(self, weights: hg.Value, d: hg.Value, slot: Slot) -> hg.Value:
        flags = self._group.flags
        names = ("kept", "rest1", "second", "rest2", "rate", "root", "eps")
        kept, rest1, second, rest2, rate, root, eps = (self._number(name, d) for name in names)
        if "weight_decay" in flags and "decoupled" in flags:
            weights = weights * kept
        mean = _kept(slot("mean"), d, lambda old: old + (d - old) * rest1)
        square = _kept(slot("square"), d, lambda old: old * second + d * d * rest2)
        if "amsgrad" in flags:
            newest = square
            square = _kept(slot("largest"), d, lambda old: hg.maximum(old, newest))
        return weights - mean * rate / (hg.sqrt(square) * root + eps)


def _kept(variable: hg.Value, like: hg.Value, update: Callable[[hg.Value], hg.Value]) -> hg.Value:
    """Assign a variable what follows from it, computed in the data type of another value."""
    return cast(hg.assign(variable, cast(update(cast(variable, like.dtype)), variable.dtype)), like.dtype)


# State


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that a step was taken, as the optimizer's own step does, for torch's schedulers."""
    optimizer._opt_called = True


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """Return how many steps an optimizer has taken. Raises UnsupportedError if parameters
    differ."""
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    if len(counts) > 1:
        raise hg.UnsupportedError(
            f"the optimizer's parameters have taken {min(counts)} to {max(counts)} steps",
            advice="begin with a new optimizer, or with one whose parameters have taken the same steps",
        )
    return counts.pop() if counts else 0


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, key: str) -> torch.Tensor:
    """Return the state of a parameter by torch's name; zeros if there is none."""
    found = optimizer.state.get(parameter, {}).get(key)
    return found if isinstance(found, torch.Tensor) else torch.zeros_like(parameter)


def write_state(
    optimizer: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    values: Mapping[str, torch.Tensor],
    steps: int | None,
) -> None:
    """Write the state of a parameter into an optimizer. `steps`: the count that Adam keeps."""
    state = optimizer.state[parameter]
    for key, tensor in values.items():
        state[key] = tensor
    if steps is not None:
        state["step"] = torch.tensor(float(steps))
