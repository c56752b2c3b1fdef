"""`hg.torch.Trainer`: training a module on a server."""

from __future__ import annotations

import inspect
import numbers
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
import torch.utils._pytree as pytree

import heliograph as hg
from heliograph._base.kept_plans import MOST_PLANS, KeptPlans
from heliograph.lowerings.importers import check_options
from heliograph.torch.compiling import session_of
from heliograph.torch.elements import as_tensor, feed_of
from heliograph.torch.training.clipping import BOUND, Clip, checked_clip
from heliograph.torch.training.graphs import forward_graph, training_graph
from heliograph.torch.training.joint import (
    Alone,
    Step,
    WithLoss,
    forward_step,
    refused_line,
    training_step,
)
from heliograph.torch.training.optimizers import flags_of, groups_of, made, note_step, numbers_of
from heliograph.torch.training.state import COUNTED, STEPS, HostState, ServerState

#: Gives a learning rate for the number of steps taken so far.
Schedule: TypeAlias = Callable[[int], float]
#: The most steps that `steps` sends ahead.
MOST_AHEAD = 64


@dataclass(frozen=True, slots=True)
class _Batch:
    """The arguments of a call: tensors, and the structure and numbers around them."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]
    form: tuple[Any, ...]

    def feeds(self) -> dict[str, Any]:
        return {f"batch_{place}": feed_of(one) for place, one in enumerate(self.tensors)}


@dataclass(frozen=True, slots=True)
class _Made:
    """A plan for batches of some form."""

    plan: hg.Plan
    step: Step
    outputs: tuple[Any, ...] = ()


class SentStep:
    """A step that was sent. Made by `trainer.submit`."""

    def __init__(self, run: hg.RunFuture, not_taken: Callable[[], None]) -> None:
        self._run = run
        self._not_taken: Callable[[], None] | None = not_taken

    def done(self) -> bool:
        """True if the step has ended, with or without an error."""
        return self._run.done()

    def cancel(self) -> bool:
        """Request the server to cancel the step. Returns False if it has already ended."""
        return self._run.cancel()

    def result(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the loss before the step.

        Raises the run's error, or DeadlineExceededError after `timeout` seconds; the step goes on
        then.
        """
        try:
            return _loss(self._run.result(timeout))
        except hg.HeliographError:
            if self._run.done() and self._not_taken is not None:
                self._not_taken()
                self._not_taken = None
            raise


class Trainer:
    """Trains a module on a server, where its parameters and the optimizer's state stay::

        trainer = hg.torch.Trainer(module, torch.nn.CrossEntropyLoss(), optimizer, session)
        for x, y in batches:
            loss = trainer.step(x, y)
        trainer.sync()

    A step computes the loss and its gradients, and updates parameters, buffers and the optimizer's
    state, all in one run. Only the batch and the loss travel. The module and the optimizer keep
    what they had until `sync` writes the server's state into them. Thread-safe.

    Args:
        module: A module in the mode for training. Each part keeps the mode that it has.
        loss: A function or module of the output and the targets, which gives one number. None: the
            module gives the loss itself.
        optimizer: A `torch.optim.SGD`, `Adam` or `AdamW` over parameters of the module; or a
            function that makes one of the parameters; or "sgd", "adam" or "adamw" with torch's
            defaults. Each step takes the learning rates and other numbers that its groups have
            then, so torch's schedulers work.
        session: A session, or the URL of a server. None: HELIOGRAPH_SERVER.
        targets: How many of the last arguments of a step are given to the loss. The default is
            what the loss requires beside the output.
        seed: Decides random numbers, such as those of dropout. The same seed gives the same
            numbers in each step.
        clip: A bound of the gradients, a `Clip`; a number is that of their norm.
        options: Arguments of `session.compile`, such as devices, memory and on_loss.

    Raises InvalidArgumentError for an optimizer of another kind or of other parameters.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Any,
        optimizer: Any,
        session: hg.Session | str | None = None,
        *,
        targets: int | None = None,
        seed: int = 0,
        clip: float | Clip | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise hg.InvalidArgumentError(f"{type(module).__name__} is no torch.nn.Module")
        check_options(options)
        self._module = WithLoss(module, loss, _targets(loss) if targets is None else targets)
        self._alone = Alone(module)
        self._optimizer = made(optimizer, module)
        self._names = {id(one): name for name, one in self._module.named_parameters()}
        self._groups = groups_of(self._optimizer, self._names)
        self._host = HostState(self._module, self._optimizer)
        self._server = ServerState(session if isinstance(session, hg.Session) else session_of(session))
        self._seed = int(seed)
        self._clip = checked_clip(clip)
        self._schedule: Schedule | None = None
        self._options = options
        self._changed: frozenset[str] = frozenset()
        self._plans: KeptPlans[_Made] = KeptPlans(MOST_PLANS)
        self._lock = threading.RLock()
        self._is_closed = False

    def __repr__(self) -> str:
        kind = type(self._optimizer).__name__
        return f"<Trainer of {type(self._module.module).__name__} by {kind}, {len(self._plans)} shapes>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, whose groups have the learning rates of the next step."""
        return self._optimizer

    @property
    def lr(self) -> float:
        """The learning rate of the next step: that of the optimizer's first group.

        A number sets that of all groups. A function of the number of steps taken so far is asked
        before each step, until a number is set. Nothing is compiled again.
        """
        with self._lock:
            self._schedule_rate()
            return float(self._optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, rate: float | Schedule) -> None:
        with self._lock:
            self._schedule = rate if callable(rate) else None
            if not callable(rate):
                self._set_rate(rate)

    @property
    def clip(self) -> Clip | None:
        """The bound of the next step's gradients. A number sets that of their norm; another number
        compiles nothing again."""
        return self._clip

    @clip.setter
    def clip(self, bound: float | Clip | None) -> None:
        self._clip = checked_clip(bound)

    @property
    def plans(self) -> tuple[hg.Plan, ...]:
        """The plans that are kept, the last used one at the end."""
        return tuple(one.plan for one in self._plans.all())

    # Steps

    def step(self, *batch: Any, timeout: float | None = None, **named: Any) -> torch.Tensor:
        """Take a step with a batch, and return its loss before the step.

        Args:
            batch: The arguments of the module, then the targets: tensors or arrays.
            timeout: Seconds to wait for the run; None means no limit.
            named: Keyword arguments of the module.

        The first batch of a shape is traced and compiled. A loss that is NaN is given as it is.
        Raises UnsupportedError, naming a node and its line; InvalidArgumentError for a loss that is
        no scalar; and the errors of `session.compile` and of the run. Variables of a lost device
        are gone with it: a new trainer goes on from the state that was saved last.
        """
        given = _batch(batch, named)
        with self._lock:
            plan, feeds = self._prepared(given)
            self._host.steps += 1
        try:
            return _loss(plan.run(feeds, timeout=timeout))
        except BaseException:
            self._not_taken()
            raise

    def submit(self, *batch: Any, timeout: float | None = None, **named: Any) -> SentStep:
        """Send a step like `step`, without waiting for its loss."""
        given = _batch(batch, named)
        with self._lock:
            plan, feeds = self._prepared(given)
            run = plan.submit(feeds, timeout=timeout)
            self._host.steps += 1
        return SentStep(run, self._not_taken)

    def steps(
        self, batches: Iterable[Any], *, ahead: int = 4, timeout: float | None = None
    ) -> Iterator[torch.Tensor]:
        """Take a step with each batch, and yield the losses in order.

        Up to `ahead` steps are sent before the loss of the first is awaited, so that the server
        does not wait for the client. A batch is a tensor, or a tuple of a step's arguments. When
        the iteration is left, steps that were sent are still taken. `timeout`: for each step.
        """
        check_ahead(ahead)
        sent: deque[SentStep] = deque()
        for one in batches:
            sent.append(self.submit(*arguments_of(one), timeout=timeout))
            if len(sent) >= ahead:
                yield sent.popleft().result(timeout)
        while sent:
            yield sent.popleft().result(timeout)

    def evaluate(self, *batch: Any, timeout: float | None = None, **named: Any) -> torch.Tensor:
        """Return the loss of a batch in the mode for evaluation, with the parameters of the server."""
        found = self._forward("evaluate", self._module, _batch(batch, named), timeout)
        return torch.as_tensor(found)

    def predict(self, *inputs: Any, timeout: float | None = None, **named: Any) -> Any:
        """Return the module's output in the mode for evaluation, with the parameters of the server."""
        return self._forward("predict", self._alone, _batch(inputs, named), timeout)

    # State

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the module's state as the server has it; the module itself stays as it is."""
        values = self._read()
        by_place = {
            id(self._host.tensor(name)): value
            for kind, name, value in ((*short.partition("/")[::2], value) for short, value in values.items())
            if kind in ("parameter", "buffer")
        }
        return {
            name: by_place.get(id(tensor), tensor).detach().clone()
            for name, tensor in self._module.module.state_dict(keep_vars=True).items()
        }

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in torch's form, and write it into the optimizer."""
        values = self._read()
        with self._lock:
            if values:
                self._host.write_optimizer(values, self._groups)
            return {**self._optimizer.state_dict(), COUNTED: {"steps": self._host.steps}}

    def load_state_dict(
        self, state: Mapping[str, Any], optimizer_state: Mapping[str, Any] | None = None
    ) -> None:
        """Load a module's state, and an optimizer's, into module and optimizer and on the server.

        Without the second, the optimizer goes on from its state on the server.
        """
        with self._lock:
            if optimizer_state is None:
                self.sync()
            self._module.module.load_state_dict(state)
            if optimizer_state is not None:
                self._optimizer.load_state_dict(dict(optimizer_state))
                self._host.count(optimizer_state.get(COUNTED, {}).get("steps"))
            self._plans.clear()
            if self._server.names:
                self._server.write(self._host.read(self._server.names, self._groups))

    def sync(self) -> None:
        """Write the server's state into the module and the optimizer."""
        values = self._read()
        with self._lock:
            if values:
                self._host.write_module(values)
                self._host.write_optimizer(values, self._groups)

    def checkpoint(self) -> hg.Checkpoint:
        """Return the elements of all variables, which `save` writes to a file.

        Raises InvalidArgumentError before the first step.
        """
        with self._lock:
            self._check_open()
            if not self._server.names:
                raise hg.InvalidArgumentError(
                    "the trainer has taken no step", advice="call trainer.step first"
                )
            return self._server.checkpoint()

    def restore(self, checkpoint: hg.Checkpoint) -> None:
        """Set the server's state to a checkpoint's, also of another trainer of such a module.

        Raises InvalidArgumentError for a checkpoint that does not fit, and for what is none.
        """
        if not isinstance(checkpoint, hg.Checkpoint):
            raise hg.InvalidArgumentError(
                f"{type(checkpoint).__name__} is no checkpoint",
                advice='one of trainer.checkpoint(), or of a file: hg.load_checkpoint("training.npz")',
            )
        with self._lock:
            self._check_open()
            values = {name: as_tensor(array) for name, array in checkpoint.items()}
            self._host.check(values)
            if self._server.names:
                self._server.restore(checkpoint)
                self._host.count(int(values[STEPS]))
            else:
                self._host.write_module(values)
                self._host.write_optimizer(values, self._groups)

    def close(self) -> None:
        """Free the plans and the variables. The module and the optimizer stay as they are."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for plan in {*self.plans, *self._server.plans}:
                plan.free()
            self._plans.clear()
            self._server.free()

    # Plans

    def _check_open(self) -> None:
        if self._is_closed:
            raise hg.InvalidArgumentError("the trainer is closed", advice="make a new one")

    def _read(self) -> dict[str, torch.Tensor]:
        with self._lock:
            self._check_open()
            return self._server.read()

    def _prepared(self, given: _Batch) -> tuple[hg.Plan, dict[str, Any]]:
        """Return the plan for a step with a batch, and what it is given."""
        self._check_open()
        self._check_batch(given, self._module.targets)
        self._schedule_rate()
        groups = self._optimizer.param_groups
        form = tuple((len(group["params"]), flags_of(self._optimizer, group)) for group in groups)
        clip = self._clip
        key = ("train", given.form, form, None if clip is None else clip.form)
        found = self._plans.find(key)
        if found is None:
            self._groups = groups_of(self._optimizer, self._names)
            found = self._plans.keep(key, self._training(given))
        feeds = given.feeds()
        for place, group in enumerate(groups):
            feeds[f"group_{place}"] = np.array(numbers_of(group))
        if clip is not None:
            feeds[BOUND] = np.array(clip.bound)
        note_step(self._optimizer)
        return found.plan, feeds

    def _not_taken(self) -> None:
        """Count a step that failed no more."""
        with self._lock:
            self._host.steps -= 1

    def _schedule_rate(self) -> None:
        if self._schedule is not None:
            self._set_rate(self._schedule(self._host.steps))

    def _set_rate(self, rate: float) -> None:
        if not isinstance(rate, numbers.Real | torch.Tensor):
            raise hg.InvalidArgumentError(
                f"the learning rate is {rate!r:.40}",
                advice="a number, or a function of the number of steps that returns one",
            )
        for group in self._optimizer.param_groups:
            # As torch's schedulers do: a tensor stays the same one.
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = float(rate)

    def _check_batch(self, given: _Batch, targets: int) -> None:
        """Check that the module takes a batch's arguments. Raises InvalidInputError."""
        module = self._module.module
        advice = f"the arguments of {type(module).__name__}.forward"
        if targets:
            advice += f", then {targets} for the loss; targets= of Trainer is another number"
        if len(given.args) < targets:
            raise hg.InvalidInputError(
                f"{len(given.args)} arguments are given, and the loss alone takes {targets}", advice=advice
            )
        inputs = given.args[: len(given.args) - targets]
        try:
            inspect.signature(module.forward).bind(*inputs, **given.named)
        except TypeError as error:
            raise hg.InvalidInputError(
                f"{type(module).__name__}.forward gets {len(inputs)} of {len(given.args)} arguments"
                + (f", the loss {targets}" if targets else "")
                + f": {error}",
                advice=advice,
            ) from None
        except ValueError:
            # A signature that Python cannot tell.
            return

    def _training(self, given: _Batch) -> _Made:
        trainable = frozenset(name for group in self._groups for name in group.names)
        step = training_step(self._module, given.args, given.named, trainable)
        if not self._changed.issuperset(step.changed):
            # Plans that were made before have these buffers as constants.
            self._changed |= frozenset(step.changed)
            self._plans.clear()
        try:
            clip = None if self._clip is None else self._clip.form
            graph = training_graph(
                step, self._host, self._server, self._groups, given.tensors, self._seed, clip
            )
        except hg.UnsupportedError as error:
            raise refused_line(self._module, given.args, given.named) or error from None
        return _Made(self._compiled(graph), step)

    def _forward(self, kind: str, module: torch.nn.Module, given: _Batch, timeout: float | None) -> Any:
        with self._lock:
            self._check_open()
            self._check_batch(given, self._module.targets if kind == "evaluate" else 0)
            key = (kind, given.form)
            found = self._plans.find(key)
            if found is None:
                found = self._plans.keep(key, self._evaluating(module, given))
        results = found.plan.run(given.feeds(), timeout=timeout)
        restored = [as_tensor(results[one]) if isinstance(one, str) else one for one in found.outputs]
        return pytree.tree_unflatten(restored, found.step.structure)

    def _evaluating(self, module: torch.nn.Module, given: _Batch) -> _Made:
        with _evaluation(module):
            step = forward_step(module, given.args, given.named)
        trainable = frozenset(name for group in self._groups for name in group.names)
        graph, outputs = forward_graph(
            step, self._host, self._server, trainable | self._changed, given.tensors
        )
        return _Made(self._compiled(graph), step, tuple(outputs))

    def _compiled(self, graph: hg.Graph) -> hg.Plan:
        plan = self._server.session.compile(graph, **self._options)
        missing = self._server.missing(plan)
        self._server.adopt(plan, self._host.read(missing, self._groups))
        return plan


def check_ahead(ahead: int) -> None:
    """Check how many steps are sent ahead. Raises InvalidArgumentError."""
    if not 1 <= ahead <= MOST_AHEAD:
        raise hg.InvalidArgumentError(f"ahead is {ahead}; it can be 1 to {MOST_AHEAD}")


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """Return the arguments of a step with a batch of an iteration."""
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def _targets(loss: Any) -> int:
    """Return how many arguments a loss requires beside the output."""
    if loss is None:
        return 0
    if not callable(loss):
        raise hg.InvalidArgumentError(
            f"the loss is {type(loss).__name__}; it is to be a function or a module",
            advice="torch.nn.functional.mse_loss is one",
        )
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss).parameters
    except (TypeError, ValueError):
        return 1
    needed = [
        one
        for one in parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return max(0, len(needed) - 1)


def _batch(args: tuple[Any, ...], named: Mapping[str, Any]) -> _Batch:
    """Return a call's arguments with arrays as tensors. Raises InvalidInputError."""
    leaves, spec = pytree.tree_flatten((args, dict(named)))
    leaves = [torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in leaves]
    tensors = tuple(one for one in leaves if isinstance(one, torch.Tensor))
    form: list[Any] = [str(spec)]
    for one in leaves:
        if isinstance(one, torch.Tensor):
            form.append((tuple(one.shape), one.dtype))
        elif one is None or isinstance(one, (bool, int, float, str)):
            form.append((type(one), one))
        else:
            raise hg.InvalidInputError(
                f"a batch has a {type(one).__name__}", advice="give tensors, arrays, and numbers of Python"
            )
    given, options = pytree.tree_unflatten(leaves, spec)
    return _Batch(given, options, tensors, tuple(form))


def _loss(results: Mapping[str, Any]) -> torch.Tensor:
    return as_tensor(np.asarray(results["loss"]))


@contextmanager
def _evaluation(module: torch.nn.Module) -> Iterator[None]:
    """Bring a module into the mode for evaluation for a while; each part returns to its own."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
