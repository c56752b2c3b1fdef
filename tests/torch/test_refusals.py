"""Wrong uses of `hg.torch` are refused at once, and the error says what belongs there."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

from torch import nn  # noqa: E402

import heliograph as hg  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.randn(2, 4)
HERE = r"test_refusals\.py:\d+"


class Calls(nn.Module):
    """A module whose forward is a function of a tensor."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Sum(nn.Module):
    def forward(self, a: Any, b: Any) -> torch.Tensor:
        return a + b


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ((X, X), r"example_options is a tensor .*\n.*\(module, \(a, b\)\)"),
        ((None,), "example_inputs is None, and must be a tensor or a tuple"),
        (({"input": X},), r"of type dict with the keys \['input'\].*\n.*keyword arguments"),
        (("x",), "example_inputs is 'x'"),
        ((X.numpy(),), "example_inputs is an array of float32"),
    ],
)
@pytest.mark.parametrize("call", [hg.torch.export, hg.torch.supported])
def test_example_inputs_that_are_none_are_refused(given: Any, match: str, call: Any) -> None:
    with pytest.raises(hg.InvalidArgumentError, match=match):
        call(nn.Linear(4, 3), *given)


@pytest.mark.parametrize(
    ("dynamic", "match"),
    [
        ({"input": {5: "b"}}, r"'input' is a tensor .* shape \[2, 4\], and has no axis 5"),
        ({"input": {"0": "b"}}, "'0' of argument 'input' is no axis"),
        ({"input": "b"}, "'input' has 2 dimensions, and 'b' is given"),
        ({"input": ["b"]}, "'input' has 2 dimensions, and .* is given"),
        ({"input": {0: 3.5}}, "dimension 0 of argument 'input' is given as 3.5"),
        ({"x": {0: "b"}}, "no argument 'x'"),
        (({0: "b"}, {0: "b"}), "is given for 1 arguments"),
        ("input", "'input' is given for 1 arguments"),
        ({"input": {1: "b"}}, r"Constraints violated .*specialized it to be a constant \(4\)"),
    ],
)
def test_dimensions_that_are_not_there_are_refused(dynamic: Any, match: str) -> None:
    with pytest.raises(hg.InvalidArgumentError, match=match):
        hg.torch.export(nn.Linear(4, 3), X, dynamic=dynamic)


def test_dimensions_of_nested_arguments_are_checked_too() -> None:
    module = Calls(lambda given: given["a"][0] * 2)
    given = {"a": [X, X[0]]}
    for dynamic, match in (
        ({"x": {"b": None}}, "'x' has no 'b'"),
        ({"x": {"a": [{0: "n"}]}}, r"\['a'\]. has 2 items, and 1 are given"),
        ({"x": {"a": [None, {1: "n"}]}}, r"\['a'\]\[1\]. .* has no axis 1"),
    ):
        with pytest.raises(hg.InvalidArgumentError, match=match):
            hg.torch.export(module, (given,), dynamic=dynamic)
    model = hg.torch.export(module, (given,), dynamic={"x": {"a": [{-2: "n"}, None]}})
    assert model.inputs[0].shape == ("n", 4)


def test_an_example_can_be_used_again_without_its_dimensions_that_varied() -> None:
    module = Calls(torch.relu)
    assert hg.torch.export(module, X, dynamic={"x": {0: "n"}}).inputs[0].shape == ("n", 4)
    assert hg.torch.export(module, X).inputs[0].shape == (2, 4)


def test_sizes_of_an_example_that_cannot_vary_are_refused() -> None:
    with pytest.raises(hg.InvalidArgumentError, match="dimension 0 of argument 'input' has size 1"):
        hg.torch.export(nn.Linear(4, 3), X[:1], dynamic={"input": {0: "batch"}})
    with pytest.raises(hg.InvalidArgumentError, match="is 'n' and has size 2 .* where another 'n' has 4"):
        hg.torch.export(Sum(), (X, X.T), dynamic={"a": {1: "n"}, "b": {1: "n"}})


def test_a_url_where_a_session_belongs_is_refused_at_once() -> None:
    for model in (
        hg.torch.export(nn.Linear(4, 3), X),
        hg.torch.export(nn.Linear(4, 3), X, dynamic=True),
    ):
        with pytest.raises(hg.InvalidArgumentError, match=r"takes a session.*\n.*hg.connect\('local:'\)"):
            model.compile("local:")
        with pytest.raises(hg.InvalidArgumentError, match="and NoneType is given"):
            model.compile(None)
    with pytest.raises(hg.InvalidArgumentError, match=r"backend\(\) takes a session.*'local:'"):
        hg.torch.backend("local:")


def test_an_unknown_option_is_refused_before_there_is_a_server() -> None:
    with hg.connect("local:") as session:
        with pytest.raises(hg.InvalidArgumentError, match="there is no option 'device'.*\n.*devices"):
            hg.torch.export(nn.Linear(4, 3), X, dynamic=True).compile(session, device="cpu0")
        with pytest.raises(hg.InvalidArgumentError, match="there is no option 'device'"):
            hg.torch.backend(session, device="cpu0")
        with pytest.raises(hg.InvalidArgumentError, match="there is no option 'device'"):
            hg.torch.Trainer(nn.Linear(4, 3), nn.MSELoss(), "sgd", session, device="cpu0")
    compiled = torch.compile(nn.Linear(4, 3), backend="heliograph", options={"sever": "local:"})
    with pytest.raises(Exception, match="there is no option 'sever'"):
        compiled(X)


def test_the_cause_of_a_failed_trace_is_told_and_chained() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the first line\nand the cause")

    with pytest.raises(
        hg.UnsupportedError, match=f"{HERE} in fails: ValueError: the first line and"
    ) as caught:
        hg.torch.export(Calls(fails), X)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(hg.UnsupportedError, match=f"{HERE} in .*AttributeError: .*'Calls'.*nothing"):
        hg.torch.export(Calls(lambda x: Calls(len).nothing), X)
    with pytest.raises(hg.UnsupportedError, match=r"RuntimeError: .*\[2, 5\] X \[4, 3\]"):
        hg.torch.export(nn.Linear(4, 3), torch.randn(2, 5))


def test_an_unknown_class_of_a_result_is_named() -> None:
    class Found:
        pass

    with pytest.raises(hg.UnsupportedError, match=r"object of .*Found, .*\n.*register_dataclass"):
        hg.torch.export(Calls(lambda x: Found()), X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.inv(x @ x.T),
        lambda x: torch.linalg.solve(x @ x.T, x),
        lambda x: torch.linalg.cholesky(x @ x.T),
        lambda x: torch.linalg.det(x @ x.T),
        torch.linalg.qr,
        torch.linalg.pinv,
        torch.linalg.svd,
        lambda x: torch.linalg.eigh(x @ x.T),
    ],
)
def test_functions_of_matrices_are_refused_by_their_op(function: Any) -> None:
    module = Calls(function)
    (missing,) = hg.torch.supported(module, X)
    assert "linalg" in missing.op and "no decompositions" in missing.reason
    assert re.search(HERE, missing.source)
    with pytest.raises(hg.UnsupportedError, match=rf"linalg.*{HERE}.*\n.*torch.compiler.disable"):
        hg.torch.export(module, X).graph()


def test_a_graph_may_break_around_a_function_of_matrices(daemon: Any) -> None:
    inverse = torch.compiler.disable(torch.linalg.inv)
    square = torch.randn(3, 3) + 4 * torch.eye(3)
    with hg.connect(daemon.unix) as session, torch.no_grad():
        compiled = torch.compile(lambda x: inverse(x * 2) + 1, backend=hg.torch.backend(session))
        torch.testing.assert_close(compiled(square), torch.linalg.inv(square * 2) + 1)
    torch._dynamo.reset()


def test_dropout_of_a_module_in_training_is_refused_by_its_part() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    for call in (hg.torch.export, hg.torch.supported):
        with pytest.raises(hg.UnsupportedError, match=r"'dropout' .*module '1', .*training.*\n.*eval\(\)"):
            call(module, X)
    assert hg.torch.supported(module.eval(), X) == ()
    # Dropout that is asked for stays: each run draws other numbers.
    dropping = Calls(lambda x: nn.functional.dropout(x, 0.5, training=True)).eval()
    assert hg.torch.supported(dropping, X) == ()


def test_tensors_on_other_devices_are_refused_by_name(daemon: Any) -> None:
    module = nn.Linear(4, 3)
    with pytest.raises(hg.InvalidArgumentError, match="'input' is on the device 'meta', .* on 'cpu'"):
        hg.torch.export(module, X.to("meta"))
    with pytest.raises(hg.InvalidArgumentError, match="'input' is on the device 'cpu', .* on 'meta'"):
        hg.torch.export(nn.Linear(4, 3, device="meta"), X)
    with pytest.raises(hg.UnsupportedError, match="weight 'weight' is on the device 'meta'"):
        hg.torch.export(nn.Linear(4, 3, device="meta"), X.to("meta")).graph()
    model = hg.torch.export(module, X)
    with hg.connect(daemon.unix) as session:
        plan = model.compile(session)
        with pytest.raises(hg.InvalidInputError, match="input 'input': a tensor on the device 'meta'"):
            plan(X.to("meta"))
        with pytest.raises(hg.InvalidInputError, match="input 'input': a tensor of layout torch.sparse_coo"):
            plan(X.to_sparse())
