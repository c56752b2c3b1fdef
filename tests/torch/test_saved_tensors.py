"""Tensors that a compiled module saves for its backward pass stay on the server."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

import torch_training  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_modules import block, convolutional, perceptron  # noqa: E402

import heliograph as hg  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nothing_compiled")]


class Wide(nn.Module):
    """A module whose activations are much larger than its inputs, weights and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return self.last(y * torch.sigmoid(y)).mean(0)


ROWS = 4096
ACTIVATION = ROWS * 64 * 4


def carried(session: hg.Session) -> tuple[int, int]:
    """Bytes from the client, and to it."""
    found = session.server_traffic()
    return found.content_bytes + found.written_bytes, found.read_bytes


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [one.grad.clone() for one in module.parameters()]


def eager(module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    module(*inputs).square().mean().backward()
    found = gradients(module)
    module.zero_grad()
    return found


def assert_near(found: object, wanted: object, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def free_bytes(session: hg.Session) -> int:
    gc.collect()
    session.synchronize()
    return session.devices[0].memory().free_bytes


def prepared(session: hg.Session, **options: Any) -> tuple[nn.Module, Any, torch.Tensor]:
    torch.manual_seed(2)
    module = Wide()
    return module, torch.compile(module, backend=hg.torch.backend(session, **options)), torch.randn(ROWS, 4)


def test_only_what_the_user_sees_crosses(remote: hg.Session) -> None:
    module, compiled, x = prepared(remote)
    compiled(x).square().mean().backward()
    module.zero_grad()
    before = carried(remote)
    compiled(x).square().mean().backward()
    sent, received = (now - then for now, then in zip(carried(remote), before, strict=True))
    assert sent < x.nbytes + 1024
    assert received < sum(one.nbytes for one in module.parameters()) + 1024
    assert sent + received < ACTIVATION / 8
    assert_near(gradients(module), eager(module, x))


def test_steps_of_training_send_the_parameters_once_each(remote: hg.Session) -> None:
    module, compiled, x = prepared(remote)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    size = sum(one.nbytes for one in module.parameters())
    for number in range(4):
        before = carried(remote)
        optimizer.zero_grad()
        wanted = eager(module, x)
        compiled(x).square().mean().backward()
        assert_near(gradients(module), wanted)
        optimizer.step()
        sent, received = (now - then for now, then in zip(carried(remote), before, strict=True))
        if number:
            assert sent < size + x.nbytes + 1024 and received < size + 1024


@pytest.mark.parametrize("make", [perceptron, convolutional, block])
def test_an_input_may_need_a_gradient_too(make: Any, session: hg.Session) -> None:
    torch.manual_seed(3)
    module, inputs = make()
    inputs = tuple(one.requires_grad_() if one.is_floating_point() else one for one in inputs)
    torch.compile(module, backend=hg.torch.backend(session))(*inputs).square().mean().backward()
    found = [*gradients(module), *(one.grad for one in inputs if one.requires_grad)]
    for one in inputs:
        one.grad = None
    wanted = [*eager(module, *inputs), *(one.grad for one in inputs if one.requires_grad)]
    assert_near(found, wanted)


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_vary_have_their_gradients(dynamic: bool | None, session: hg.Session) -> None:
    torch.manual_seed(5)
    module = Wide()
    compiled = torch.compile(module, backend=hg.torch.backend(session), dynamic=dynamic)
    for rows in (6, 3, 9):
        x = torch.randn(rows, 4)
        wanted = eager(module, x)
        compiled(x).square().mean().backward()
        assert_near(gradients(module), wanted)


def test_a_transformer_with_shared_weights_has_its_gradients(session: hg.Session) -> None:
    torch.manual_seed(6)
    case = torch_training.gpt(1, layers=2)
    ((tokens, targets),) = case.batches
    compiled = torch.compile(case.module, backend=hg.torch.backend(session))
    case.loss(compiled(tokens), targets).backward()
    found = gradients(case.module)
    case.module.zero_grad()
    case.loss(case.module(tokens), targets).backward()
    assert_near(found, gradients(case.module))


def test_frozen_parameters_stay_weights_of_both_passes(remote: hg.Session) -> None:
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 1))
    module[1].requires_grad_(False)
    compiled, x = torch.compile(module, backend=hg.torch.backend(remote)), torch.randn(2, 8)
    for number in range(3):
        before = carried(remote)
        module.zero_grad()
        compiled(x).sum().backward()
        if number:
            assert carried(remote)[0] - before[0] < 256 * 256 * 4 / 8
    found = [one.grad for one in module.parameters() if one.requires_grad]
    module.zero_grad()
    module(x).sum().backward()
    assert_near(found, [one.grad for one in module.parameters() if one.requires_grad])


def test_saved_tensors_are_freed_with_the_graph(remote: hg.Session) -> None:
    _, compiled, x = prepared(remote)
    compiled(x).sum().backward()
    free = free_bytes(remote)
    result = compiled(x)  # no backward pass
    assert free - free_bytes(remote) > 2 * ACTIVATION
    del result
    assert abs(free - free_bytes(remote)) < ACTIVATION
    loss = compiled(x).sum()
    loss.backward()  # frees what was saved, though the loss lives
    assert abs(free - free_bytes(remote)) < ACTIVATION


def test_an_error_between_the_passes_frees_them(remote: hg.Session) -> None:
    _, compiled, x = prepared(remote)
    compiled(x).sum().backward()
    free = free_bytes(remote)
    with pytest.raises(RuntimeError, match="no gradient of this"):
        _fails(compiled(x))
    assert abs(free - free_bytes(remote)) < ACTIVATION


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no gradient of this")


def _fails(result: torch.Tensor) -> None:
    _Failing.apply(result).sum().backward()


def test_a_graph_that_is_retained_has_its_gradients_twice(remote: hg.Session) -> None:
    module, compiled, x = prepared(remote)
    loss = compiled(x).square().mean()
    loss.backward(retain_graph=True)
    first = gradients(module)
    loss.backward()
    assert_near(gradients(module), [2 * one for one in first])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_forward_passes_have_their_own(session: hg.Session) -> None:
    module, compiled, x = prepared(session)
    losses = [compiled(x * factor).square().mean() for factor in (1, 2, 3)]
    found = []
    for loss in losses:
        module.zero_grad()
        loss.backward()
        found.append(gradients(module))
    for factor, one in zip((1, 2, 3), found, strict=True):
        assert_near(one, eager(module, x * factor))


@pytest.mark.parametrize("make", [perceptron, convolutional])
def test_a_change_of_parameters_between_the_passes_spoils_no_gradient(make: Any, session: hg.Session) -> None:
    torch.manual_seed(2)
    module, inputs = make()
    wanted = eager(module, *inputs)
    loss = torch.compile(module, backend=hg.torch.backend(session))(*inputs).square().mean()
    with torch.no_grad():
        for one in module.parameters():
            one.mul_(2)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert_near(gradients(module), wanted)


def test_without_gradients_nothing_is_saved(remote: hg.Session) -> None:
    _, compiled, x = prepared(remote)
    with torch.no_grad():
        compiled(x)
        free = free_bytes(remote)
        result = compiled(x)
        assert abs(free - free_bytes(remote)) < ACTIVATION
    assert not result.requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpoints_around_a_compiled_module(reentrant: bool, session: hg.Session) -> None:
    module, compiled, x = prepared(session)
    wanted = eager(module, x)
    run = partial(checkpoint, compiled, use_reentrant=reentrant)
    run(x.requires_grad_()).square().mean().backward()
    assert_near(gradients(module), wanted)


def test_gradient_checkpoints_within_a_compiled_module(session: hg.Session) -> None:
    torch.manual_seed(2)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Wide()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    module, x = Outer(), torch.randn(64, 4)
    torch.compile(module, backend=hg.torch.backend(session))(x).square().mean().backward()
    found = gradients(module)
    assert_near(found, eager(module, x))


def test_hooks_of_saved_tensors_see_their_elements(session: hg.Session) -> None:
    module, compiled, x = prepared(session)
    wanted = eager(module, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one * 1, lambda one: one):
        loss = compiled(x).square().mean()
    loss.backward()
    assert_near(gradients(module), wanted)
    module.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        loss = compiled(x).square().mean()
    loss.backward()
    assert_near(gradients(module), wanted)


def test_a_hook_that_changes_a_saved_tensor_is_refused(session: hg.Session) -> None:
    _, compiled, x = prepared(session)

    def spoil(one: torch.Tensor) -> torch.Tensor:
        return one if one.requires_grad else one.mul_(2)

    with (
        torch.autograd.graph.saved_tensors_hooks(spoil, lambda one: one),
        pytest.raises(hg.UnsupportedError, match="would change a tensor that is saved"),
    ):
        compiled(x)


def test_compiled_autograd_computes_the_same(session: hg.Session) -> None:
    module, compiled, x = prepared(session)
    wanted = eager(module, x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        loss = compiled(x).square().mean()
        loss.backward()
    assert_near(gradients(module), wanted)


def test_dropout_has_one_mask_in_both_passes(session: hg.Session) -> None:
    drop = torch.compile(nn.Dropout(0.5), backend=hg.torch.backend(session))
    x = torch.ones(512, requires_grad=True)
    y = drop(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()) and 0 < int((y == 0).sum()) < 512


def test_rebuilt_plans_bring_saved_tensors_back(session: hg.Session) -> None:
    module, compiled, x = prepared(session, on_loss="rebuild")
    compiled(x).square().mean().backward()
    found = gradients(module)
    assert_near(found, eager(module, x))


def test_gradients_that_torch_computes_here_have_the_saved_elements(
    session: hg.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heliograph.torch import compiling, parts

    module, compiled, x = prepared(session)
    made = parts.Part

    def refusing(graph: Any, shared: Any, stay: Any = None, saved: Any = None) -> Any:
        if stay is None:
            raise hg.UnsupportedError("there is no rule for a node of the backward pass")
        return made(graph, shared, stay, saved)

    monkeypatch.setattr(compiling, "Part", refusing)
    compiled(x).square().mean().backward()
    found = gradients(module)
    assert_near(found, eager(module, x))


def test_a_lost_session_ends_the_backward_pass_with_its_error(daemon: Any) -> None:
    with hg.connect(daemon.tcp) as session:
        _, compiled, x = prepared(session)
        loss = compiled(x).square().mean()
        session.close()
        with pytest.raises(hg.HeliographError):
            loss.backward()
