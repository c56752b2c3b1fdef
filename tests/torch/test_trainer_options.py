"""A trainer's bound of gradients, learning rates, wrong calls, and its form for asyncio."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import heliograph as hg  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

Batch = tuple[torch.Tensor, torch.Tensor]
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)


def small() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return module, [(torch.randn(4, 5), torch.randn(4, 3)) for _ in range(6)]


def eager(
    module: nn.Module,
    batches: list[Batch],
    clip: Callable[[Any], object] = lambda parameters: None,
    rate: Callable[[int], float] = lambda step: 0.5,
) -> list[float]:
    module = copy.deepcopy(module)
    optimizer = SGD(module.parameters())
    losses = []
    for number, (x, y) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = rate(number)
        optimizer.zero_grad()
        loss = functional.mse_loss(module(x), y)
        loss.backward()
        clip(module.parameters())
        optimizer.step()
        losses.append(loss.item())
    return losses


def trainer_of(module: nn.Module, session: hg.Session, **options: Any) -> hg.torch.Trainer:
    module = copy.deepcopy(module)
    return hg.torch.Trainer(module, functional.mse_loss, SGD(module.parameters()), session, **options)


def falling(step: int) -> float:
    return 0.5 * 0.8**step


BOUNDS = {
    "norm": (0.1, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1)),
    "norm that is not reached": (100.0, lambda parameters: nn.utils.clip_grad_norm_(parameters, 100.0)),
    "largest": (
        {"norm": 0.1, "norm_type": math.inf},
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1, math.inf),
    ),
    "value": ({"value": 0.02}, lambda parameters: nn.utils.clip_grad_value_(parameters, 0.02)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_gradients_are_clipped_as_torch_clips_them(name: str, session: hg.Session) -> None:
    given, clip = BOUNDS[name]
    bound = hg.torch.Clip(**given) if isinstance(given, dict) else given
    module, batches = small()
    with trainer_of(module, session, clip=bound) as trainer:
        losses = [float(trainer.step(*batch)) for batch in batches]
        assert len(trainer.plans) == 1
    torch.testing.assert_close(losses, eager(module, batches, clip), rtol=1e-5, atol=1e-6)


def test_another_bound_compiles_nothing_again(session: hg.Session) -> None:
    module, batches = small()
    bounds = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]
    left = iter(bounds)
    with trainer_of(module, session, clip=1.0) as trainer:
        losses = []
        for batch, bound in zip(batches, bounds, strict=True):
            trainer.clip = bound
            losses.append(float(trainer.step(*batch)))
        assert len(trainer.plans) == 1
        assert trainer.clip == hg.torch.Clip(norm=1.6)
        trainer.clip = None
        trainer.step(*batches[0])
        assert len(trainer.plans) == 2
    wanted = eager(module, batches, lambda parameters: nn.utils.clip_grad_norm_(parameters, next(left)))
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_is_clipped_as_in_torch(session: hg.Session) -> None:
    module = nn.Linear(2, 1, bias=False)
    x, y = torch.tensor([[math.inf, 1.0]]), torch.zeros(1, 1)
    with hg.torch.Trainer(module, functional.mse_loss, "sgd", session, clip=1.0) as trainer:
        trainer.step(x, y)
        assert trainer.state_dict()["weight"].isnan().all()


def test_the_learning_rate_is_set_between_steps(session: hg.Session) -> None:
    module, batches = small()
    with trainer_of(module, session) as trainer:
        losses = []
        for number, batch in enumerate(batches):
            trainer.lr = falling(number)
            assert trainer.lr == falling(number) == trainer.optimizer.param_groups[0]["lr"]
            losses.append(float(trainer.step(*batch)))
        assert len(trainer.plans) == 1
    torch.testing.assert_close(losses, eager(module, batches, rate=falling), rtol=1e-5, atol=1e-6)


def test_a_function_of_the_steps_gives_the_learning_rate(session: hg.Session) -> None:
    module, batches = small()
    with trainer_of(module, session) as trainer:
        trainer.lr = falling
        losses = [float(loss) for loss in trainer.steps(batches[:4])]
        checkpoint = trainer.checkpoint()
        with pytest.raises(hg.InvalidInputError):
            trainer.step(batches[0][0])
        losses.append(float(trainer.step(*batches[4])))
        assert trainer.lr == falling(5)
        trainer.restore(checkpoint)
        assert trainer.lr == falling(4)
        losses[4:] = [float(trainer.step(*batch)) for batch in batches[4:]]
        trainer.lr = 0.25
        trainer.step(*batches[0])
        assert trainer.lr == 0.25
    torch.testing.assert_close(losses, eager(module, batches, rate=falling), rtol=1e-5, atol=1e-6)


def test_a_learning_rate_is_a_number(session: hg.Session) -> None:
    module, batches = small()
    with trainer_of(module, session) as trainer:
        with pytest.raises(hg.InvalidArgumentError, match="the learning rate is 'fast'"):
            trainer.lr = "fast"
        trainer.lr = lambda step: None
        with pytest.raises(hg.InvalidArgumentError, match="the learning rate is None"):
            trainer.step(*batches[0])


def test_a_step_that_fails_is_not_counted(session: hg.Session) -> None:
    module = nn.Linear(5, 3)
    x = torch.randn(2, 5)
    with hg.torch.Trainer(module, nn.CrossEntropyLoss(), "sgd", session) as trainer:
        trainer.lr = lambda step: float(step)
        trainer.step(x, torch.tensor([0, 1]))
        with pytest.raises(hg.OutOfRangeError):
            trainer.step(x, torch.tensor([0, 7]))
        sent = trainer.submit(x, torch.tensor([0, 7]))
        for _ in range(2):
            with pytest.raises(hg.OutOfRangeError):
                sent.result()
        assert sent.done() and not sent.cancel()
        assert trainer.lr == 1.0


def test_weight_decay_is_of_each_group(session: hg.Session) -> None:
    _, batches = small()
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def make(one: nn.Module) -> torch.optim.Optimizer:
        decayed = [each for each in one.parameters() if each.ndim > 1]
        rest = [each for each in one.parameters() if each.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.05)

    peer = copy.deepcopy(module)
    optimizer = make(peer)
    with hg.torch.Trainer(module, functional.mse_loss, make(module), session) as trainer:
        for x, y in batches:
            trainer.step(x, y)
            optimizer.zero_grad()
            functional.mse_loss(peer(x), y).backward()
            optimizer.step()
        trainer.sync()
    torch.testing.assert_close(module.state_dict(), peer.state_dict(), rtol=1e-4, atol=1e-4)


# Wrong calls


CALLS: dict[str, tuple[Callable[[Any, Batch], object], str]] = {
    "no targets": (lambda trainer, batch: trainer.step(batch[0]), "gets 0 of 1 arguments, the loss 1: miss"),
    "no arguments": (lambda trainer, batch: trainer.step(), "0 arguments .* the loss alone takes 1"),
    "too many": (lambda trainer, batch: trainer.step(*batch, batch[1]), "gets 2 of 3 arguments, the loss 1"),
    "another name": (lambda trainer, batch: trainer.step(*batch, mask=batch[0]), "argument 'mask'"),
    "no targets to evaluate": (lambda trainer, batch: trainer.evaluate(batch[0]), "gets 0 of 1 arguments"),
    "nothing to predict of": (lambda trainer, batch: trainer.predict(), "gets 0 of 0 arguments: missing"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_other_arguments_than_the_module_takes_is_refused(name: str, session: hg.Session) -> None:
    call, message = CALLS[name]
    module, batches = small()
    with trainer_of(module, session) as trainer, pytest.raises(hg.InvalidInputError, match=message):
        call(trainer, batches[0])


def test_a_path_is_no_checkpoint(session: hg.Session) -> None:
    module, _ = small()
    with (
        trainer_of(module, session) as trainer,
        pytest.raises(hg.InvalidArgumentError, match=r"str is no checkpoint(.|\n)*load_checkpoint"),
    ):
        trainer.restore("training.npz")


@pytest.mark.parametrize(
    "given", [{}, {"norm": 1, "value": 1}, {"norm": -1.0}, {"norm": math.nan}, {"norm": 1, "norm_type": 3}]
)
def test_a_bound_that_is_none_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="clipped by|norm_type"):
        hg.torch.Clip(**given)


def test_a_clip_of_another_type_is_refused(session: hg.Session) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="clip is str"):
        trainer_of(small()[0], session, clip="1.0")


# asyncio


async def arriving(batches: list[Batch]) -> AsyncIterator[Batch]:
    for batch in batches:
        await asyncio.sleep(0)
        yield batch


def test_training_in_a_program_of_asyncio_has_the_same_losses(session: hg.Session) -> None:
    module, batches = small()

    async def main() -> tuple[list[float], dict[str, Any], int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.001)

        beating = asyncio.create_task(beat())
        async with hg.torch.AsyncTrainer(trainer_of(module, session)) as training:
            losses = [float(await training.step(*batches[0]))]
            losses += [float(loss) async for loss in training.steps(batches[1:3])]
            losses += [float(loss) async for loss in training.steps(arriving(batches[3:]), ahead=2)]
            checkpoint = await training.checkpoint()
            await training.step(*batches[0])
            await training.restore(checkpoint)
            state = await training.state_dict()
            await training.load_state_dict(state, await training.optimizer_state_dict())
            await training.sync()
            assert torch.equal(training.trainer._module.module.state_dict()["0.weight"], state["0.weight"])
            assert float(await training.evaluate(*batches[0])) > 0
            assert (await training.predict(batches[0][0])).shape == (4, 3)
        beating.cancel()
        with pytest.raises(hg.InvalidArgumentError, match="closed"):
            await training.step(*batches[0])
        return losses, state, beats

    losses, state, beats = asyncio.run(main())
    with trainer_of(module, session) as trainer:
        assert losses == [float(trainer.step(*batch)) for batch in batches]
        assert all(torch.equal(one, state[name]) for name, one in trainer.state_dict().items())
    assert beats > 2  # the event loop went on while the module was traced


def test_a_task_that_is_cancelled_cancels_its_step(session: hg.Session) -> None:
    module, batches = small()

    async def main() -> None:
        async with hg.torch.AsyncTrainer(trainer_of(module, session)) as training:
            await training.step(*batches[0])
            for delay in (0, 0.0005, 0.002):
                step = asyncio.create_task(training.step(*batches[1]))
                await asyncio.sleep(delay)
                step.cancel()
                await asyncio.wait([step])
            assert (await training.step(*batches[2])).isfinite()

    asyncio.run(main())


def test_an_async_trainer_is_made_of_a_trainer() -> None:
    with pytest.raises(hg.InvalidArgumentError, match=r"Linear is no hg\.torch\.Trainer"):
        hg.torch.AsyncTrainer(nn.Linear(2, 2))
