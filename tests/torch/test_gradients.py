"""Gradients of PyTorch's ops beside those of eager torch, many of them in one step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

import torch_training as cases  # noqa: E402
from torch.nn import functional  # noqa: E402

import heliograph as hg  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

Function = Callable[..., Any]
PLANE, LINE, ROOM, ROWS = (2, 4, 9, 8), (2, 4, 11), (1, 2, 5, 6, 5), (3, 7)
INDICES = torch.tensor([[1, 4, 1], [0, 1, 6]])
MASK = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(3)) > 0.3
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Function]] = {
    "conv2d": (PLANE, (6, 4, 3, 3), lambda x, w: functional.conv2d(x, w, padding=1)),
    "conv2d of stride 2": (PLANE, (6, 4, 3, 2), lambda x, w: functional.conv2d(x, w, stride=2, padding=1)),
    "conv2d that leaves a rest": (PLANE, (6, 4, 2, 2), lambda x, w: functional.conv2d(x, w, stride=3)),
    "conv2d dilated": (PLANE, (6, 4, 3, 3), lambda x, w: functional.conv2d(x, w, dilation=2)),
    "conv2d of one element": (PLANE, (6, 4, 1, 1), functional.conv2d),
    "conv2d of one element and stride": (PLANE, (6, 4, 1, 1), lambda x, w: functional.conv2d(x, w, stride=2)),
    "conv2d depthwise": (PLANE, (4, 1, 3, 3), lambda x, w: functional.conv2d(x, w, padding=1, groups=4)),
    "conv2d in groups": (PLANE, (6, 2, 3, 3), lambda x, w: functional.conv2d(x, w, stride=2, groups=2)),
    "conv1d": (LINE, (5, 4, 3), lambda x, w: functional.conv1d(x, w, stride=2, padding=2)),
    "conv3d": (ROOM, (3, 2, 2, 3, 2), lambda x, w: functional.conv3d(x, w, padding=1)),
    "conv_transpose2d": (
        PLANE,
        (4, 3, 3, 3),
        lambda x, w: functional.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
    ),
    "conv_transpose1d": (LINE, (4, 3, 4), lambda x, w: functional.conv_transpose1d(x, w, stride=3)),
}
FUNCTIONS: dict[str, tuple[tuple[int, ...], Function]] = {
    "max_pool2d": (PLANE, lambda x: functional.max_pool2d(x, 2)),
    "max_pool2d that overlaps": (PLANE, lambda x: functional.max_pool2d(x, 3, 2, 1)),
    "max_pool2d dilated": (PLANE, lambda x: functional.max_pool2d(x, 2, 2, dilation=2)),
    "max_pool2d with a last part": (PLANE, lambda x: functional.max_pool2d(x, 2, ceil_mode=True)),
    "max_pool3d": (ROOM, lambda x: functional.max_pool3d(x, 2)),
    "avg_pool2d": (PLANE, lambda x: functional.avg_pool2d(x, 2)),
    "avg_pool2d padded": (
        PLANE,
        lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    ),
    "avg_pool1d": (LINE, lambda x: functional.avg_pool1d(x, 3, 2)),
    "avg_pool3d": (ROOM, lambda x: functional.avg_pool3d(x, 2, divisor_override=3)),
    "adaptive_avg_pool2d": (PLANE, lambda x: functional.adaptive_avg_pool2d(x, (4, 1))),
    "softmax": (ROWS, lambda x: functional.softmax(x, -1)),
    "softmax of columns": (ROWS, lambda x: functional.softmax(x, 0)),
    "log_softmax": (ROWS, lambda x: functional.log_softmax(x, 1)),
    "gelu": (ROWS, functional.gelu),
    "gelu by tanh": (ROWS, lambda x: functional.gelu(x, approximate="tanh")),
    "silu": (ROWS, functional.silu),
    "hardswish": (ROWS, functional.hardswish),
    "elu": (ROWS, functional.elu),
    "leaky_relu": (ROWS, functional.leaky_relu),
    "softplus": (ROWS, functional.softplus),
    "sigmoid and tanh": (ROWS, lambda x: x.sigmoid() * x.tanh()),
    "layer_norm": (ROWS, lambda x: functional.layer_norm(x, (7,), x[0], x[1])),
    "layer_norm of two axes": (PLANE, lambda x: functional.layer_norm(x, (9, 8))),
    "group_norm": (PLANE, lambda x: functional.group_norm(x, 2, x[0, :, 0, 0], x[0, :, 1, 1])),
    "batch_norm": (
        PLANE,
        lambda x: functional.batch_norm(x, None, None, x[0, :, 0, 0], x[1, :, 1, 1], training=True),
    ),
    "batch_norm by statistics": (
        PLANE,
        lambda x: functional.batch_norm(x, torch.arange(4.0), torch.arange(1.0, 5), x[0, :, 0, 0]),
    ),
    "embedding": (ROWS[::-1], lambda x: functional.embedding(INDICES, x)),
    "embedding with padding": (ROWS[::-1], lambda x: functional.embedding(INDICES, x, padding_idx=1)),
    "slices": (PLANE, lambda x: x[:, 1:3, ::2, -5:-1] * x[:, :2, 1:6, 2:6]),
    "select": (PLANE, lambda x: x[1, :, -2] * x[0, :, 0]),
    "gather": (ROWS, lambda x: x.gather(1, INDICES)),
    "index": (ROWS, lambda x: x[INDICES[1, :2], INDICES[0, :2]]),
    "attention": (
        (2, 3, 5, 4),
        lambda x: functional.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True),
    ),
    "attention with a mask": (
        (2, 3, 5, 4),
        lambda x: functional.scaled_dot_product_attention(x, x * 2, x + 1, MASK, scale=0.7),
    ),
    "cross_entropy": (
        ROWS,
        lambda x: functional.cross_entropy(x, INDICES[:, 0].repeat(2)[:3], label_smoothing=0.1),
    ),
    "nll_loss without some": (ROWS, lambda x: functional.nll_loss(x, torch.tensor([1, -100, 4]))),
    "mse_loss": (ROWS, lambda x: functional.mse_loss(x, x.flip(0) * 2)),
    "smooth_l1_loss": (ROWS, lambda x: functional.smooth_l1_loss(x, torch.ones(3, 7))),
    "binary_cross_entropy": (
        ROWS,
        lambda x: functional.binary_cross_entropy_with_logits(x, torch.full((3, 7), 0.3)),
    ),
    "products": (ROWS, lambda x: x @ x.T + (x[None] @ x.mT[None])[0]),
    "norms": (ROWS, lambda x: x.norm(dim=1) + x.square().mean(1, keepdim=True).rsqrt()[:, 0] + x.std(1)),
    "choices": (
        ROWS,
        lambda x: torch.where(x > 0, x, x * 2).clamp(-1, 1.5) + x.abs() + x.amax(1, keepdim=True),
    ),
    "joining": (ROWS, lambda x: torch.cat([x, x[:, :2]], 1).cumsum(1).flip(1).roll(1, 0)),
    "narrow floats": (ROWS, lambda x: functional.gelu(x.bfloat16()).float()),
}


#: Parts that are traced at once, each in some seconds.
PARTS = 6
ALL: dict[str, tuple[Any, ...]] = {**CONVOLUTIONS, **FUNCTIONS}


class Together(torch.nn.Module):
    """Parameters for functions; its output is one number that depends on all results."""

    def __init__(self, functions: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.functions = functions
        self.inputs = torch.nn.ParameterList(
            torch.randn(shape) for *shapes, _ in functions for shape in shapes
        )

    def forward(self) -> torch.Tensor:
        place, total = 0, torch.zeros(())
        for *shapes, function in self.functions:
            found = function(*self.inputs[place : place + len(shapes)])
            place += len(shapes)
            # Other factors for each element, so that gradients differ.
            total = total + (found * torch.linspace(0.5, 1.5, found.numel()).view(found.shape)).sum()
        return total


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_gradient_of_every_op_is_near_that_of_eager(part: int) -> None:
    torch.manual_seed(2)
    functions = dict(list(ALL.items())[part::PARTS])
    module = Together(list(functions.values()))
    loss = module()
    wanted = torch.autograd.grad(loss, list(module.parameters()))
    # With a rate of 1, the step is the gradient.
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with hg.connect("local:") as session, hg.torch.Trainer(module, None, optimizer, session) as trainer:
        found = trainer.step()
        after = trainer.state_dict()
    torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-5)
    names = [name for name, one in functions.items() for _ in one[:-1]]
    for place, (name, one) in enumerate(zip(names, wanted, strict=True)):
        gradient = module.inputs[place].detach() - after[f"inputs.{place}"]
        tolerance = 2e-2 if name == "narrow floats" else 1e-4
        torch.testing.assert_close(
            gradient, one, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
def test_a_compiled_module_has_the_gradients_of_eager_on_the_server() -> None:
    torch.manual_seed(3)
    torch._dynamo.reset()
    case = cases.residual(1)
    (x, y), eager = case.batches[0], copy.deepcopy(case.module)
    case.loss(eager(x), y).backward()
    # Where torch computes gradients here, it warns, which is an error in tests.
    with hg.connect("local:") as session:
        compiled = torch.compile(case.module, backend=hg.torch.backend(session))
        case.loss(compiled(x), y).backward()
    for (name, found), wanted in zip(case.module.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(dict(case.module.named_buffers()), dict(eager.named_buffers()))
    torch._dynamo.reset()
