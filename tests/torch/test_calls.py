"""A plan is called as its module is: keywords, defaults, and nested arguments."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

from torch import nn  # noqa: E402

import heliograph as hg  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture
def local(daemon: Any) -> Iterator[hg.Session]:
    with hg.connect(daemon.unix) as made:
        yield made


class Every(nn.Module):
    """A module with arguments of every kind."""

    def forward(
        self, x: Any, *more: Any, pair: Any, scale: int = 2, mask: Any = None, **rest: Any
    ) -> torch.Tensor:
        found = x * scale + pair[0] - pair[1]["low"]
        for number, one in enumerate((*more, *(rest[key] for key in sorted(rest)))):
            found = found + one * (number + 3)
        return found if mask is None else found * mask


PAIR = (X * 5, {"low": X + 1, "high": X})


@pytest.fixture
def every(local: hg.Session) -> hg.torch.TorchPlan:
    return hg.torch.export(Every(), (X, X), {"pair": PAIR, "b": X, "a": X}).compile(local)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((X, X + 2), {"pair": PAIR, "b": X * 7, "a": X * 9}),
        ((X, X + 2), {"a": X * 9, "b": X * 7, "pair": PAIR}),
        ((X, X + 2), {"a": X * 9, "b": X * 7, "pair": PAIR, "mask": None, "scale": 2}),
        ((X, X), {"a": X, "b": X, "pair": [X, {"high": X, "low": X * 4}]}),
        ((X, X), {"a": X, "b": X, "pair": (X, collections.OrderedDict(high=X, low=X))}),
    ],
)
def test_a_plan_is_called_as_the_module_is(args: Any, named: Any, every: hg.torch.TorchPlan) -> None:
    torch.testing.assert_close(every(*args, **named), Every()(*args, **named))


@pytest.mark.parametrize(
    ("args", "named", "match"),
    [
        ((), {}, r"does not fit forward\(x: .*: missing a required"),
        ((X, X), {"a": X, "b": X, "pair": PAIR, "x": X}, "multiple values for argument 'x'"),
        ((X,), {"a": X, "b": X, "pair": PAIR}, r"'more\[0\]' was a tensor .*, and is missing"),
        ((X, X, X), {"a": X, "b": X, "pair": PAIR}, r"'more\[1\]' was absent .* and is a tensor of torch.f"),
        ((X, X), {"a": X, "b": X, "c": X, "pair": PAIR}, "'c' was absent"),
        ((X, X), {"a": X, "b": X, "pair": PAIR, "scale": 3}, "'scale' was 2 .*, and is 3"),
        ((X, X), {"a": X, "b": X, "pair": PAIR, "mask": X}, r"'mask' was None .* tensor .* shape \[3\]"),
        ((X, X), {"a": X, "b": X, "pair": X}, "'pair' was of type tuple and length 2 .* is a tensor"),
        ((X, X), {"a": X, "b": X, "pair": (X, [X])}, r"'pair\[1\]' was of type dict with the keys \['low'"),
        ((X, X), {"a": X, "b": X, "pair": (X, {"low": X})}, r"and is of type dict with the keys \['low'\]"),
        ((X, X), {"a": {}, "b": X, "pair": PAIR}, "'a' was a tensor .*, and is of type dict"),
        ((None, X), {"a": X, "b": X, "pair": PAIR}, "'x' was a tensor .*, and is None"),
    ],
)
def test_another_call_is_refused_by_the_argument(
    args: Any, named: Any, match: str, every: hg.torch.TorchPlan
) -> None:
    with pytest.raises(hg.InvalidInputError, match=match) as caught:
        every(*args, **named)
    assert "TreeSpec" not in str(caught.value)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, count: int = 3, mask: Any = None) -> torch.Tensor:
        return x * count if mask is None else x * mask


def test_defaults_may_be_given_or_left_out_on_both_sides(local: hg.Session) -> None:
    for example in ((X,), (X, 3), (X, 3, None)):
        plan = hg.torch.export(Scaled(), example).compile(local)
        for found in (plan(X), plan(x=X), plan(X, 3), plan(mask=None, x=X), plan(X, count=3, mask=None)):
            assert torch.equal(found, X * 3)
        with pytest.raises(hg.InvalidInputError, match="'count' was 3 .*, and is 4"):
            plan(X, count=4)
    plan = hg.torch.export(Scaled(), X, {"count": 4}).compile(local)
    assert torch.equal(plan(X, 4), X * 4)
    with pytest.raises(hg.InvalidInputError, match="'count' was 4 .*, and is 3"):
        plan(X)
    plan = hg.torch.export(Scaled(), (X, 3, X)).compile(local)
    with pytest.raises(hg.InvalidInputError, match="'mask' was a tensor .*, and is None"):
        plan(X)


@dataclasses.dataclass
class Found:
    total: torch.Tensor
    parts: Any


torch.export.register_dataclass(Found)
Both = collections.namedtuple("Both", "left right")


class Nested(nn.Module):
    def forward(self, given: Found, both: Both) -> Any:
        return Found(given.total + both.left, ({"right": both.right * 2}, [given.parts[0], None, 7])), both


def test_dataclasses_and_named_tuples_are_arguments_and_results(local: hg.Session) -> None:
    module = Nested()
    plan = hg.torch.export(module, (Found(X, (X,)), Both(X, X))).compile(local)
    given = {"both": Both(X + 1, X - 1), "given": Found(X * 3, [X])}
    found, both = plan(**given)
    wanted, _ = module(**given)
    assert isinstance(found, Found) and isinstance(both, Both)
    assert torch.equal(found.total, wanted.total) and torch.equal(both.right, X - 1)
    assert torch.equal(found.parts[0]["right"], wanted.parts[0]["right"]) and found.parts[1][1:] == [None, 7]
    with pytest.raises(hg.InvalidInputError, match="'both' was of type namedtuple .*, and is of type tuple"):
        plan(given["given"], (X, X))
    with pytest.raises(hg.InvalidInputError, match=r"'given\[1\]' was of type tuple and length 1"):
        plan(Found(X, (X, X)), given["both"])


class Difference(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a - 2 * b


def test_a_tensor_that_the_example_has_twice_is_two_inputs(local: hg.Session) -> None:
    plan = hg.torch.export(Difference(), (X, X)).compile(local)
    assert torch.equal(plan(X, X + 1), X - 2 * (X + 1))
