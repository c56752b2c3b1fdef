"""Training modules on a server, beside eager torch."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-torch` installs it")

import torch_training as cases  # noqa: E402
from losing import losable  # noqa: E402
from torch.nn import functional  # noqa: E402

import heliograph as hg  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
MOMENTUM = partial(SGD, lr=0.01, momentum=0.9, weight_decay=1e-4)


def trained(case: cases.Case, make: Any, session: hg.Session, **options: Any) -> tuple[list[float], Any]:
    """The losses of all batches, and the state at the end."""
    module = copy.deepcopy(case.module)
    with hg.torch.Trainer(module, case.loss, make(module.parameters()), session, **options) as trainer:
        losses = [float(trainer.step(*batch)) for batch in case.batches]
        return losses, trainer.state_dict()


def small(count: int = 6) -> cases.Case:
    """A module that is quickly traced."""
    module = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    batches = [(torch.randn(4, 5), torch.randn(4, 3)) for _ in range(count)]
    return cases.Case(module, functional.mse_loss, batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (cases.perceptron, partial(SGD, lr=0.05, momentum=0.9, nesterov=True)),
        (cases.residual, MOMENTUM),
        (cases.gpt, partial(AdamW, lr=1e-3)),
    ],
)
def test_fifty_steps_are_as_near_to_float64_as_eager(make: Any, optimizer: Any, session: hg.Session) -> None:
    torch.manual_seed(0)
    case = make(50)
    eager, exact = cases.eager(case, optimizer), cases.eager(case, optimizer, torch.float64)
    losses, state = trained(case, optimizer, session)
    assert len(losses) == 50
    for found, wanted in zip(losses, eager.losses, strict=True):
        assert abs(found - wanted) <= 1e-4 * abs(wanted)
    reference = exact.module.state_dict()
    assert cases.distance(state, reference) <= 2 * cases.distance(eager.module.state_dict(), reference)


def test_a_batch_that_the_loss_refuses_leaves_the_state_as_it_was(session: hg.Session) -> None:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    x, labels = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    losses = []
    for is_disturbed in (False, True):
        with hg.torch.Trainer(module, torch.nn.CrossEntropyLoss(), "adam", session) as trainer:
            losses.append([float(trainer.step(x, labels))])
            if is_disturbed:
                with pytest.raises(hg.OutOfRangeError):
                    trainer.step(x, torch.tensor([3, 1, 2, 0]))
            losses[-1].append(float(trainer.step(x, labels)))
    assert losses[0] == losses[1]


OPTIMIZERS = {
    "descent": partial(SGD, lr=0.1),
    "dampened": partial(SGD, lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.01),
    "nesterov": partial(SGD, lr=0.1, momentum=0.8, nesterov=True, maximize=True),
    "adam": partial(Adam, lr=0.01, weight_decay=0.1),
    "amsgrad": partial(Adam, lr=0.01, betas=(0.8, 0.9), amsgrad=True, eps=1e-6),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1, maximize=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_steps_as_torch_does(name: str, session: hg.Session) -> None:
    torch.manual_seed(1)
    case, make = small(), OPTIMIZERS[name]
    eager = cases.eager(case, make)
    module = copy.deepcopy(case.module)
    with hg.torch.Trainer(module, case.loss, make(module.parameters()), session) as trainer:
        losses = [float(trainer.step(*batch)) for batch in case.batches]
        trainer.sync()
        found, wanted = trainer.optimizer.state_dict(), eager.optimizer.state_dict()
    torch.testing.assert_close(losses, eager.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(module.state_dict(), eager.module.state_dict(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["state"], wanted["state"], rtol=1e-4, atol=1e-6)


def test_groups_have_their_own_options_and_schedulers_change_them(session: hg.Session) -> None:
    torch.manual_seed(2)
    case = small()

    def make(parameters: Any) -> Any:
        first, *rest = parameters
        groups = [{"params": [first], "lr": 0.05}, {"params": rest, "weight_decay": 0.1}]
        return SGD(groups, lr=0.1, momentum=0.9)

    schedule = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=[0.3, 0.2], total_steps=10)
    eager = cases.eager(case, make, schedule=schedule)
    module = copy.deepcopy(case.module)
    optimizer = make(module.parameters())
    scheduler = schedule(optimizer)
    losses = []
    with hg.torch.Trainer(module, case.loss, optimizer, session) as trainer:
        for batch in case.batches:
            losses.append(float(trainer.step(*batch)))
            scheduler.step()
        assert len(trainer.plans) == 1
    torch.testing.assert_close(losses, eager.losses, rtol=1e-5, atol=1e-6)


class Odd(torch.nn.Module):
    """Weights that are shared, frozen or unused, and a buffer that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen, self.unused = torch.nn.Linear(5, 5).requires_grad_(False), torch.nn.Linear(5, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.register_buffer("average", torch.zeros(5))
        self.register_buffer("scale", torch.linspace(1, 2, 5), persistent=False)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        y = self.second(torch.relu_(self.first(x)))
        with torch.no_grad():
            if self.training:
                self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
            still = self.frozen(y)
        z = self.norm(y * still + y.detach() * y) * self.scale + self.average
        return z if shift is None else z + shift


def odd(count: int = 5) -> cases.Case:
    return cases.Case(
        Odd(), functional.mse_loss, [(torch.randn(6, 5), torch.randn(6, 5)) for _ in range(count)]
    )


def test_shared_frozen_and_unused_weights_and_buffers_are_as_in_eager(session: hg.Session) -> None:
    torch.manual_seed(3)
    case, make = odd(), partial(AdamW, lr=0.01, weight_decay=0.1)
    eager = cases.eager(case, make)
    module = copy.deepcopy(case.module)
    with hg.torch.Trainer(module, case.loss, make(module.parameters()), session) as trainer:
        losses = [float(trainer.step(*batch)) for batch in case.batches]
        trainer.sync()
        assert module.first.weight is module.second.weight
        torch.testing.assert_close(losses, eager.losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(module.state_dict(), eager.module.state_dict(), rtol=1e-4, atol=1e-5)
        x, y = case.batches[0]
        wanted = eager.module.eval()(x)
        torch.testing.assert_close(trainer.predict(x), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(trainer.evaluate(x, y), case.loss(wanted, y), rtol=1e-4, atol=1e-4)
        assert module.training and module.norm.training
    found = set(trainer.optimizer.state_dict()["state"])
    assert found == set(eager.optimizer.state_dict()["state"])


def test_evaluation_before_the_first_step_uses_the_module_as_it_is(session: hg.Session) -> None:
    torch.manual_seed(4)
    case = odd(1)
    x, y = case.batches[0]
    wanted = copy.deepcopy(case.module).eval()(x).detach()
    with hg.torch.Trainer(case.module, case.loss, "sgd", session) as trainer:
        torch.testing.assert_close(trainer.predict(x), wanted)
        trainer.step(x, y)
        assert not torch.allclose(trainer.predict(x), wanted, atol=1e-4)


def test_the_module_changes_only_by_sync(session: hg.Session) -> None:
    torch.manual_seed(5)
    case = small()
    before = copy.deepcopy(case.module.state_dict())
    with hg.torch.Trainer(case.module, case.loss, partial(SGD, lr=0.1), session) as trainer:
        trainer.step(*case.batches[0])
        after = trainer.state_dict()
        torch.testing.assert_close(case.module.state_dict(), before)
        trainer.sync()
    torch.testing.assert_close(case.module.state_dict(), after)
    assert not torch.equal(after["0.weight"], before["0.weight"])


def test_a_run_takes_the_batch_and_the_numbers_of_the_groups_and_gives_the_loss(session: hg.Session) -> None:
    torch.manual_seed(6)
    case = small(1)
    with hg.torch.Trainer(case.module, case.loss, "adam", session) as trainer:
        trainer.step(*case.batches[0])
        (plan,) = trainer.plans
        assert set(plan.inputs) == {"batch_0", "batch_1", "group_0"}
        assert set(plan.outputs) == {"loss"}
        # Four parameters with two moments each, and the counter of steps.
        assert len(plan.variables) == 3 * 4 + 1


def test_steps_are_sent_ahead_with_the_same_losses(session: hg.Session) -> None:
    torch.manual_seed(7)
    case = small(9)
    one_by_one, state = trained(case, partial(Adam, lr=0.01), session)
    module = copy.deepcopy(case.module)
    with hg.torch.Trainer(module, case.loss, partial(Adam, lr=0.01), session) as trainer:
        ahead = [float(loss) for loss in trainer.steps(case.batches, ahead=3)]
        assert ahead == one_by_one
        assert all(torch.equal(one, state[name]) for name, one in trainer.state_dict().items())
        with pytest.raises(hg.InvalidArgumentError, match="ahead is 0"):
            next(trainer.steps(case.batches, ahead=0))


def test_training_goes_on_from_a_saved_state_with_the_same_bits(tmp_path: Path, session: hg.Session) -> None:
    torch.manual_seed(8)
    case = cases.gpt(6, layers=1, dropout=0.2)
    whole, state = trained(case, partial(AdamW, lr=0.01), session, seed=5)
    module = copy.deepcopy(case.module)
    with hg.torch.Trainer(module, case.loss, partial(AdamW, lr=0.01), session, seed=5) as trainer:
        losses = [float(trainer.step(*batch)) for batch in case.batches[:3]]
        torch.save((trainer.state_dict(), trainer.optimizer_state_dict()), tmp_path / "state.pt")
        trainer.checkpoint().save(tmp_path / "state.npz")
    for form in ("state.pt", "state.npz"):
        other = cases.GPT(layers=1, dropout=0.2)
        with hg.torch.Trainer(other, case.loss, partial(AdamW, lr=0.01), session, seed=5) as trainer:
            if form == "state.pt":
                trainer.load_state_dict(*torch.load(tmp_path / form))
            else:
                trainer.restore(hg.load_checkpoint(tmp_path / form))
            rest = [float(trainer.step(*batch)) for batch in case.batches[3:]]
            assert losses + rest == whole, form
            assert all(torch.equal(one, state[name]) for name, one in trainer.state_dict().items()), form


def test_a_state_can_be_loaded_between_steps(session: hg.Session) -> None:
    torch.manual_seed(9)
    case = small(2)
    start = copy.deepcopy(case.module.state_dict())
    with hg.torch.Trainer(case.module, case.loss, partial(SGD, lr=0.1), session) as trainer:
        first = trainer.step(*case.batches[0])
        trainer.load_state_dict(start)
        assert torch.equal(trainer.step(*case.batches[0]), first)


def test_dropout_differs_by_step_and_is_the_same_for_a_seed(session: hg.Session) -> None:
    torch.manual_seed(10)
    layers = torch.nn.Linear(5, 4000), torch.nn.Dropout(0.25), torch.nn.Linear(4000, 1)
    # A rate of 0 leaves dropout alone as what differs.
    batch = torch.ones(1, 5), torch.zeros(1, 1)
    case = cases.Case(torch.nn.Sequential(*layers), functional.mse_loss, [batch] * 4)
    first, again, other = (trained(case, partial(SGD, lr=0.0), session, seed=seed)[0] for seed in (1, 1, 2))
    assert first == again
    assert len(set(first + other)) == 8


def test_a_share_of_elements_is_dropped_and_their_gradients_too(session: hg.Session) -> None:
    class Dropped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.nn.Parameter(torch.ones(10_000))

        def forward(self) -> torch.Tensor:
            return functional.dropout(self.x, 0.25).sum()

    module = Dropped()
    with hg.torch.Trainer(module, None, partial(SGD, lr=1.0), session) as trainer:
        loss = float(trainer.step())
        gradient = 1 - trainer.state_dict()["x"]
    kept = gradient != 0
    assert 7_200 < int(kept.sum()) < 7_800
    torch.testing.assert_close(gradient[kept], torch.full((int(kept.sum()),), 4 / 3))
    assert abs(loss - float(gradient.sum())) < 1


def test_each_shape_of_a_batch_has_a_plan_and_all_share_the_state(
    session: hg.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heliograph.torch.training.trainer.MOST_PLANS", 2)
    torch.manual_seed(11)
    case = small(1)
    batches = [(torch.randn(size, 5), torch.randn(size, 3)) for size in (4, 2, 3, 4)]
    case = cases.Case(case.module, case.loss, batches)
    make = partial(SGD, lr=0.1, momentum=0.9)
    eager = cases.eager(case, make)
    module = copy.deepcopy(case.module)
    with hg.torch.Trainer(module, case.loss, make, session) as trainer:
        losses = [float(trainer.step(*batch)) for batch in batches]
        assert len(trainer.plans) == 2
    torch.testing.assert_close(losses, eager.losses, rtol=1e-5, atol=1e-6)


def test_a_loss_of_nan_is_given_as_it_is(session: hg.Session) -> None:
    case = small(1)
    x, y = case.batches[0]
    with hg.torch.Trainer(case.module, case.loss, "sgd", session) as trainer:
        assert trainer.step(torch.full_like(x, float("nan")), y).isnan()
        assert trainer.state_dict()["0.weight"].isnan().all()


def test_targets_and_options_go_where_they_belong(session: hg.Session) -> None:
    torch.manual_seed(12)
    module = Odd()
    x, y, shift = torch.randn(6, 5), torch.randn(6, 5), torch.randn(5)

    def loss(output: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean() * weight

    wanted = loss(copy.deepcopy(module)(x, shift=shift), y, torch.tensor(2.0)).detach()
    with hg.torch.Trainer(module, loss, "sgd", session) as trainer:
        torch.testing.assert_close(trainer.step(x, y, torch.tensor(2.0), shift=shift), wanted)


def test_bfloat16_is_trained_as_in_eager(session: hg.Session) -> None:
    torch.manual_seed(14)
    case = small(4)
    case.module.bfloat16()
    batches = [(x.bfloat16(), y.bfloat16()) for x, y in case.batches]
    case = cases.Case(case.module, case.loss, batches)
    eager = cases.eager(case, MOMENTUM, torch.bfloat16)
    losses, state = trained(case, MOMENTUM, session)
    torch.testing.assert_close(losses, eager.losses, rtol=2e-2, atol=1e-3)
    assert state["0.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(state, eager.module.state_dict(), rtol=2e-2, atol=5e-3)


# Arguments that do not fit


def test_a_wrong_optimizer_is_refused_with_what_is_supported(session: hg.Session) -> None:
    module, other = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    with pytest.raises(hg.InvalidArgumentError, match=r"of shape \[1, 3\] that is none of the module"):
        hg.torch.Trainer(module, functional.mse_loss, SGD(other.parameters(), lr=0.1), session)
    with pytest.raises(hg.InvalidArgumentError, match="Adagrad is no optimizer.*\n?.*SGD, Adam and AdamW"):
        hg.torch.Trainer(module, functional.mse_loss, torch.optim.Adagrad(module.parameters()), session)
    with pytest.raises(hg.InvalidArgumentError, match="there is no optimizer 'lion'"):
        hg.torch.Trainer(module, functional.mse_loss, "lion", session)


def assert_refused(
    session: hg.Session, module: Any, loss: Any, batch: Any, kind: type[hg.HeliographError], match: str
) -> None:
    """A step ends with an error, and the next one too."""
    with hg.torch.Trainer(module, loss, "sgd", session) as trainer:
        for _ in range(2):
            with pytest.raises(kind, match=match):
                trainer.step(*batch)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda out, y: (out - y).square(), r"no scalar: it has shape \[4, 3\]"),
        (lambda out, y: (out, y), "the loss gives 2 results"),
        (lambda out, y: out.detach().mean() + y.mean(), "no parameter of the optimizer has a gradient"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(loss: Any, match: str, session: hg.Session) -> None:
    batch = torch.randn(4, 2), torch.randn(4, 3)
    assert_refused(session, torch.nn.Linear(2, 3), loss, batch, hg.InvalidArgumentError, match)


def test_a_loss_that_cannot_be_called_is_refused(session: hg.Session) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="the loss is int"):
        hg.torch.Trainer(torch.nn.Linear(2, 3), 3, "sgd", session)


class Choosing(torch.nn.Linear):
    """Its input decides which way it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class Transforming(torch.nn.Linear):
    """Complex numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(super().forward(x)).abs()


@pytest.mark.parametrize(
    ("kind", "match"),
    [(Choosing, r"depends on data, .*test_training\.py"), (Transforming, r"test_training\.py.* no complex")],
)
def test_what_cannot_be_traced_is_refused(kind: Any, match: str, session: hg.Session) -> None:
    batch = torch.randn(4, 2), torch.randn(4, 3)
    assert_refused(session, kind(2, 3), functional.mse_loss, batch, hg.UnsupportedError, match)


def test_a_batch_of_other_things_is_refused(session: hg.Session) -> None:
    case = small(1)
    batch = object(), case.batches[0][1]
    assert_refused(session, case.module, case.loss, batch, hg.InvalidInputError, "a batch has a object")


def test_a_checkpoint_of_another_module_is_refused(session: hg.Session) -> None:
    case, other = small(1), torch.nn.Linear(5, 3)
    with hg.torch.Trainer(case.module, case.loss, "sgd", session) as trainer:
        with pytest.raises(hg.InvalidArgumentError, match="has taken no step"):
            trainer.checkpoint()
        trainer.step(*case.batches[0])
        checkpoint = trainer.checkpoint()
    for is_first in (True, False):
        with hg.torch.Trainer(other, case.loss, "sgd", session) as trainer:
            if not is_first:
                trainer.step(*case.batches[0])
            with pytest.raises(hg.InvalidArgumentError, match="nothing of this name"):
                trainer.restore(checkpoint)


def test_a_closed_trainer_is_refused_and_leaves_nothing(session: hg.Session) -> None:
    case = small(1)
    free = session.devices[0].memory().free_bytes
    trainer = hg.torch.Trainer(case.module, case.loss, "adam", session)
    trainer.step(*case.batches[0])
    trainer.close()
    trainer.close()
    session.synchronize()
    assert session.devices[0].memory().free_bytes == free
    with pytest.raises(hg.InvalidArgumentError, match="the trainer is closed"):
        trainer.step(*case.batches[0])


def test_a_lost_device_ends_a_step_with_its_error_and_a_new_trainer_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(13)
    case = small(3)
    with losable("local", monkeypatch) as found, hg.connect(found.url) as session:
        trainer = hg.torch.Trainer(case.module, case.loss, partial(SGD, lr=0.1), session, devices=["fake1"])
        trainer.step(*case.batches[0])
        trainer.sync()
        found.lose("fake1")
        with pytest.raises(hg.DeviceLostError):
            trainer.step(*case.batches[1])
        with hg.torch.Trainer(
            case.module, case.loss, partial(SGD, lr=0.1), session, devices=["fake2"]
        ) as again:
            assert again.step(*case.batches[1]).isfinite()


def test_a_step_is_repeated_on_another_device_with_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(15)
    case = small(4)
    with hg.connect("local:") as session:
        whole, state = trained(case, partial(Adam, lr=0.01), session)
    module = copy.deepcopy(case.module)
    losses = []
    with (
        losable("local", monkeypatch) as found,
        hg.connect(found.url) as session,
        hg.torch.Trainer(
            module,
            case.loss,
            partial(Adam, lr=0.01),
            session,
            devices=["fake1", "fake2"],
            on_loss="rebuild",
        ) as trainer,
    ):
        for number, batch in enumerate(case.batches):
            losses.append(float(trainer.step(*batch)))
            if number == 1:
                found.lose("fake1")
        after = trainer.state_dict()
    torch.testing.assert_close(losses, whole)
    torch.testing.assert_close(after, state)
