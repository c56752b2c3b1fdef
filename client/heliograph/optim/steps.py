"""Steps of gradient descent with momentum, of Adam and of AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from heliograph.functions.trees import leaves_of, refilled
from heliograph.graph.builder import Graph, assign
from heliograph.graph.lowering import apply, cast, is_value, reshape
from heliograph.graph.source_lines import invalid
from heliograph.graph.value import Value
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import F32, F64

#: A number, or a value of one float, such as an input that each run gives.
Rate: TypeAlias = "float | Value"
#: The new value of a variable, from its value, its gradient and its name.
_Update: TypeAlias = Callable[[Value, Value, str], Value]


def sgd(
    variables: Any,
    gradients: Any,
    learning_rate: Rate,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    name: str = "sgd",
) -> Any:
    """Assign variables a step of gradient descent, and return their new values.

    With d = gradient + weight_decay * w, and v = momentum * v + d, it is w - learning_rate * v, or
    with `nesterov` w - learning_rate * (d + momentum * v).

    Args:
        variables: Variables of the graph, or views of them: one, or lists, tuples and
            dictionaries of them.
        gradients: Their gradients, in the same structure: `hg.grad(loss, variables)`.
        learning_rate: A number, or a value of one float, such as an input of each run.
        momentum: The part of the last step that stays; with 0 there is no state.
        nesterov: True for the gradient where the momentum leads.
        weight_decay: The factor of the weights that is added to their gradients.
        name: The first part of the names of the state's variables, "NAME/VARIABLE/momentum".

    Raises InvalidGraphError and InvalidArgumentError for arguments that do not fit.
    """
    _check_share("momentum", momentum)
    _check_decay(weight_decay)
    if nesterov and not momentum:
        raise invalid("sgd: nesterov without momentum", "momentum=0.9 is usual", InvalidArgumentError)
    rate = _Rate(learning_rate)

    def update(w: Value, d: Value, where: str) -> Value:
        if weight_decay:
            d = d + w * weight_decay
        if momentum:
            kept = _state(w, f"{where}/momentum")
            kept = assign(kept, kept * momentum + d)
            d = d + kept * momentum if nesterov else kept
        return w - d * rate.of(w)

    return _updated(variables, gradients, name, update)


def adam(
    variables: Any,
    gradients: Any,
    learning_rate: Rate = 1e-3,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    name: str = "adam",
) -> Any:
    """Assign variables a step of Adam (Kingma and Ba, 2015), and return their new values.

    With m = beta1 * m + (1 - beta1) * d and v = beta2 * v + (1 - beta2) * d * d, both divided by
    1 - beta ** t in step t, it is w - learning_rate * m / (sqrt(v) + eps). The decay is a part of
    d = gradient + weight_decay * w.

    The state is "NAME/VARIABLE/m", "NAME/VARIABLE/v" and the counter "NAME/t". The other arguments
    are those of `sgd`.
    """
    return _adam(variables, gradients, _Adam(learning_rate, beta1, beta2, eps, weight_decay, False), name)


def adamw(
    variables: Any,
    gradients: Any,
    learning_rate: Rate = 1e-3,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    name: str = "adamw",
) -> Any:
    """Assign variables a step of AdamW (Loshchilov and Hutter, 2019), and return their new values.

    As `adam`, but the decay leaves the moments alone: it takes learning_rate * weight_decay * w
    from w.
    """
    return _adam(variables, gradients, _Adam(learning_rate, beta1, beta2, eps, weight_decay, True), name)


@dataclass(frozen=True, slots=True)
class _Adam:
    """The numbers of a step of Adam."""

    learning_rate: Rate
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    #: True if the decay is no part of the gradient.
    is_apart: bool


def _adam(variables: Any, gradients: Any, how: _Adam, name: str) -> Any:
    _check_share("beta1", how.beta1)
    _check_share("beta2", how.beta2)
    _check_decay(how.weight_decay)
    rate, counter = _Rate(how.learning_rate), _Counter(name)

    def update(w: Value, d: Value, where: str) -> Value:
        decay, alpha = how.weight_decay, rate.of(w)
        if decay and not how.is_apart:
            d = d + w * decay
        m, v = _state(w, f"{where}/m"), _state(w, f"{where}/v")
        m = assign(m, m * how.beta1 + d * (1.0 - how.beta1))
        v = assign(v, v * how.beta2 + d * d * (1.0 - how.beta2))
        first, second = counter.corrections(w, how)
        step = (m / first) / (apply("sqrt", v) / second + how.eps) * alpha
        return (w - w * (alpha * decay) if decay and how.is_apart else w) - step

    return _updated(variables, gradients, name, update)


class _Counter:
    """The number of steps so far, in one variable of the graph."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count: Value | None = None

    def corrections(self, like: Value, how: _Adam) -> tuple[Value, Value]:
        """Return 1 - beta1 ** t and sqrt(1 - beta2 ** t), computed in f64."""
        if self._count is None:
            count = like.graph.variable(f"{self._name}/t", (), "i64")
            self._count = cast(assign(count, count + 1), F64)
        # Powers of f64 alone: 1 - 0.999 has three digits less in f32.
        first, second = (1.0 - _power(beta, self._count) for beta in (how.beta1, how.beta2))
        return cast(first, like.dtype), cast(apply("sqrt", second), like.dtype)


def _power(base: float, exponent: Value) -> Value:
    return apply("pow", exponent.graph.full((), base, F64), exponent)


class _Rate:
    """A learning rate as a factor of each variable's step."""

    def __init__(self, given: Rate) -> None:
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        is_one = is_value(given) and given.size == 1 and given.dtype.is_float
        if not is_number and not is_one:
            raise invalid(
                f"the learning rate is {given!r:.80}",
                "a number, or a value of one float: g.input('rate', (), 'f32')",
                InvalidArgumentError,
            )
        self._given = given

    def of(self, like: Value) -> float | Value:
        """Return it in the data type of a value."""
        given = self._given
        return cast(reshape(given, ()), like.dtype) if is_value(given) else float(given)


def _updated(variables: Any, gradients: Any, name: str, update: _Update) -> Any:
    """Assign each variable its new value; narrow floats are updated in f32."""
    if not isinstance(name, str) or not name:
        raise invalid(f"{name!r:.40} is no name of an optimizer", kind=InvalidArgumentError)
    new = []
    for variable, gradient in _pairs(variables, gradients):
        wide = variable.dtype if variable.dtype is F64 else F32
        found = update(cast(variable, wide), cast(gradient, wide), f"{name}/{variable.name}")
        new.append((variable, cast(found, variable.dtype)))
    return refilled(variables, iter([assign(variable, value) for variable, value in new]))


def _pairs(variables: Any, gradients: Any) -> list[tuple[Value, Value]]:
    """Return variables with their gradients. Raises InvalidArgumentError, InvalidGraphError."""
    first, second = list(leaves_of(variables)), list(leaves_of(gradients))
    if [path for path, _ in first] != [path for path, _ in second]:
        raise invalid(
            f"{len(first)} variables and {len(second)} gradients: their structures differ",
            "give both the same way: hg.optim.sgd(w, hg.grad(loss, w), 0.1)",
            InvalidArgumentError,
        )
    for (path, variable), (_, gradient) in zip(first, second, strict=True):
        if not is_value(variable) or not is_value(gradient) or variable.shape != gradient.shape:
            raise invalid(
                f"variable{path} is {variable!r:.80}, its gradient {gradient!r:.80}",
                "both are values of one shape: hg.optim.sgd(w, hg.grad(loss, w), 0.1)",
                InvalidArgumentError,
            )
    return [(variable, gradient) for (_, variable), (_, gradient) in zip(first, second, strict=True)]


def _state(like: Value, name: str) -> Value:
    graph: Graph = like.graph
    return graph.variable(name, like.shape, like.dtype)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise invalid(f"{name} is {value!r:.40}", "from 0 to below 1", InvalidArgumentError)


def _check_decay(value: float) -> None:
    if not value >= 0:
        raise invalid(f"weight_decay is {value!r:.40}", "a number, 0 or more", InvalidArgumentError)
