"""`torch.compile` with the backend: parameters stay, graphs break, shapes vary, gradients flow."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

from forked_daemons import running_daemon  # noqa: E402
from torch import nn  # noqa: E402
from torch_modules import block, convolutional, perceptron  # noqa: E402

import heliograph as hg  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nothing_compiled")]


def assert_near(found: object, wanted: object, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def sent_bytes(session: hg.Session) -> int:
    found = session.server_traffic()
    return found.content_bytes + found.written_bytes + found.copied_in_bytes


@pytest.mark.parametrize("make", [perceptron, convolutional, block])
def test_a_compiled_module_is_near_eager(make: Any, session: hg.Session) -> None:
    torch.manual_seed(2)
    module, inputs = make()
    compiled = torch.compile(module, backend=hg.torch.backend(session))
    with torch.no_grad():
        assert_near(compiled(*inputs), module(*inputs))


@pytest.mark.parametrize("make", [perceptron, convolutional, block])
def test_gradients_are_those_of_eager(make: Any) -> None:
    torch.manual_seed(2)
    module, inputs = make()
    with hg.connect("local:") as session:
        torch.compile(module, backend=hg.torch.backend(session))(*inputs).square().mean().backward()
        found = [one.grad.clone() for one in module.parameters()]
    module.zero_grad()
    module(*inputs).square().mean().backward()
    assert_near(found, [one.grad for one in module.parameters()])


def test_parameters_are_not_sent_with_each_call(remote: hg.Session) -> None:
    module = nn.Linear(512, 512)
    compiled = torch.compile(module, backend=hg.torch.backend(remote))
    with torch.no_grad():
        compiled(torch.randn(1, 512))
        before = sent_bytes(remote)
        for _ in range(4):
            compiled(torch.randn(1, 512))
    assert sent_bytes(remote) - before < 512 * 512 * 4 / 2


def test_parameters_that_change_are_sent_once(remote: hg.Session) -> None:
    module = nn.Linear(256, 256)
    compiled = torch.compile(module, backend=hg.torch.backend(remote))
    x = torch.randn(1, 256)
    with torch.no_grad():
        compiled(x)
        for _ in range(3):
            module.weight.mul_(1.5)
            assert_near(compiled(x), module(x), 1e-4)
        before = sent_bytes(remote)
        for _ in range(4):
            assert_near(compiled(x), module(x), 1e-4)
        assert sent_bytes(remote) - before < 256 * 256 * 4 / 2
        module.weight = nn.Parameter(torch.randn(256, 256))
        assert_near(compiled(x), module(x), 1e-4)


def test_a_parameter_of_other_memory_is_sent(remote: hg.Session) -> None:
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    compiled = torch.compile(module, backend=hg.torch.backend(remote))
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            compiled(x)
            module.weight.data = torch.randn(4, 4)
            assert_near(compiled(x), module(x))


class Layer(nn.Module):
    """A module whose graph serves all modules of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


@pytest.mark.parametrize("with_gradients", [False, True])
def test_modules_of_one_graph_have_parameters_of_their_own(with_gradients: bool, remote: hg.Session) -> None:
    torch.manual_seed(2)
    layers = [Layer() for _ in range(4)]
    backend = hg.torch.backend(remote)
    compiled = nn.Sequential(*(torch.compile(one, backend=backend) for one in layers))
    x = torch.randn(2, 128)
    with torch.set_grad_enabled(with_gradients):
        for _ in range(2):
            assert_near(compiled(x), nn.Sequential(*layers)(x))
        before = sent_bytes(remote)
        found = compiled(x)
        if with_gradients:
            found.sum().backward()
    assert sent_bytes(remote) - before < 128 * 128 * 4
    if with_gradients:
        gradients = [one.inner.weight.grad.clone() for one in layers]
        nn.Sequential(*layers).zero_grad()
        nn.Sequential(*layers)(x).sum().backward()
        assert_near(gradients, [one.inner.weight.grad for one in layers], 1e-4)


def test_modules_of_one_graph_run_in_threads(remote: hg.Session) -> None:
    torch.manual_seed(2)
    layers = [Layer() for _ in range(3)]
    backend = hg.torch.backend(remote)
    compiled = [torch.compile(one, backend=backend) for one in layers]
    x = torch.randn(2, 128)
    compiled[0](x)

    def check(place: int) -> None:
        for _ in range(20):
            given = x.clone().requires_grad_()
            (found,) = torch.autograd.grad(compiled[place](given).sum(), given)
            (wanted,) = torch.autograd.grad(layers[place](given).sum(), given)
            assert_near(found, wanted, 1e-4)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(check, range(3)))


def test_prims_that_decompositions_leave_have_rules() -> None:
    import torch._inductor.inductor_prims

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        whole = torch.ops.prims.convert_element_type(torch.ops.prims.fma(a, b, a), torch.int32)
        return torch.ops.aten.true_divide(whole, b)

    a, b = 10 * torch.randn(7), torch.rand(7) + 1
    with hg.connect("local:") as session:
        assert_near(torch.compile(function, backend=hg.torch.backend(session))(a, b), function(a, b))


class Breaks(nn.Module):
    """A module whose graph breaks where it looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if x.sum() > 0:
            return self.layer(x) + 1
        return -x


def test_graphs_may_break_where_control_flow_depends_on_data() -> None:
    torch.manual_seed(2)
    module = Breaks()
    with hg.connect("local:") as session, torch.no_grad():
        compiled = torch.compile(module, backend=hg.torch.backend(session))
        for sign in (1, -1, 1):
            x = sign * torch.ones(3, 4)
            assert_near(compiled(x), module(x))


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_other_shapes_are_compiled_when_they_come(dynamic: bool | None) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))
    with hg.connect("local:") as session, torch.no_grad():
        compiled = torch.compile(module, backend=hg.torch.backend(session), dynamic=dynamic)
        for batch in (2, 5, 3, 1):
            x = torch.randn(batch, 4)
            assert_near(compiled(x), module(x))


def test_inputs_that_forward_changes_are_changed() -> None:
    def add(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total += x
        return total * 2

    with hg.connect("local:") as session:
        compiled = torch.compile(add, backend=hg.torch.backend(session))
        total = torch.zeros(3)
        for _ in range(2):
            found = compiled(torch.ones(3), total)
        assert total.tolist() == [2, 2, 2] and found.tolist() == [4, 4, 4]


def test_the_backend_has_a_name_and_takes_a_server_as_an_option(daemon: Any) -> None:
    module, x = nn.Linear(4, 3), torch.randn(2, 4)
    assert "heliograph" in torch._dynamo.list_backends()
    compiled = torch.compile(module, backend="heliograph", options={"server": daemon.tcp})
    with torch.no_grad():
        assert_near(compiled(x), module(x))
    hg.torch.compiling._close()


def test_a_session_that_is_lost_is_opened_again() -> None:
    torch.manual_seed(2)
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    x = torch.randn(2, 4)
    settings = ("--device", "cpu:threads=1,memory=1GiB")
    with torch.no_grad():
        with running_daemon(*settings) as url:
            options = {"server": url}
            compiled = [torch.compile(one, backend="heliograph", options=options) for one in modules]
            for one, module in zip(compiled, modules, strict=True):
                assert_near(one(x), module(x))
            modules[0].weight.mul_(2)
            assert_near(compiled[0](x), modules[0](x))
        # Without a server each call is refused, and the next one tries again.
        for _ in range(2):
            with pytest.raises(hg.UnavailableError, match="no server answers"):
                compiled[0](x)
        with running_daemon(*settings, listen=url):
            modules[1].weight.mul_(3)
            for one, module in zip(compiled, modules, strict=True):
                assert_near(one(x), module(x))
            session = hg.torch.compiling.session_of(url)
            session.close()
            for one, module in zip(compiled, modules, strict=True):
                assert_near(one(x), module(x))
            assert hg.torch.compiling.session_of(url) is not session
            hg.torch.compiling._close()


def test_a_backward_pass_of_a_lost_session_says_so(daemon: Any) -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    compiled = torch.compile(module, backend="heliograph", options={"server": daemon.tcp})
    lost = compiled(x).sum()
    hg.torch.compiling.session_of(daemon.tcp).close()
    compiled(x).sum().backward()
    with pytest.raises(hg.SessionClosedError, match="compute the loss again"):
        lost.backward()
    hg.torch.compiling._close()


def test_a_session_that_was_given_is_not_opened_again(daemon: Any) -> None:
    with hg.connect(daemon.unix) as session, torch.no_grad():
        compiled = torch.compile(nn.ReLU(), backend=hg.torch.backend(session))
        compiled(torch.randn(3))
    with pytest.raises(hg.SessionClosedError):
        compiled(torch.randn(3))


def test_an_op_without_a_rule_is_named() -> None:
    with hg.connect("local:") as session:
        compiled = torch.compile(torch.linalg.svdvals, backend=hg.torch.backend(session))
        with pytest.raises(Exception, match=r"_linalg_svd.*there are no decompositions"):
            compiled(torch.randn(3, 3))
