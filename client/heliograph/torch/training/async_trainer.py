"""`hg.torch.AsyncTrainer`: training within a program of asyncio."""

# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar

import torch

import heliograph as hg
from heliograph.torch.training.trainer import SentStep, Trainer, arguments_of, check_ahead

_Result = TypeVar("_Result")


class AsyncTrainer:
    """A trainer whose methods are awaited, for programs of asyncio::

        trainer = hg.torch.Trainer(module, loss, optimizer, session)
        async with hg.torch.AsyncTrainer(trainer) as training:
            async for loss in training.steps(batches):
                ...
            await training.sync()

    The event loop goes on while the module is traced, the graph is compiled and steps run: they
    have a thread of their own, in which the calls run one after the other. Methods have the
    arguments and errors of the trainer's. The learning rate and the bound of gradients are set on
    `trainer` itself.

    A task that is cancelled while it awaits a step cancels the step. Other calls are completed.
    """

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise hg.InvalidArgumentError(
                f"{type(trainer).__name__} is no hg.torch.Trainer",
                advice="AsyncTrainer(hg.torch.Trainer(module, loss, optimizer, session))",
            )
        self._trainer = trainer
        self._thread = ThreadPoolExecutor(1, "heliograph-trainer")
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<AsyncTrainer of {self._trainer!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.close()

    @property
    def trainer(self) -> Trainer:
        """The trainer."""
        return self._trainer

    # Steps

    async def step(self, *batch: Any, timeout: float | None = None, **named: Any) -> torch.Tensor:
        """Take a step with a batch, and return its loss before the step."""
        sent = await self._do(partial(self._trainer.submit, *batch, timeout=timeout, **named))
        return await self._awaited(sent, timeout)

    async def steps(
        self,
        batches: Iterable[Any] | AsyncIterable[Any],
        *,
        ahead: int = 4,
        timeout: float | None = None,
    ) -> AsyncIterator[torch.Tensor]:
        """Take a step with each batch, and yield the losses in order.

        Up to `ahead` steps are sent before the loss of the first is awaited. `batches` may be an
        asynchronous iterable too.
        """
        check_ahead(ahead)
        sent: deque[SentStep] = deque()
        async for one in _each(batches):
            sent.append(await self._do(partial(self._trainer.submit, *arguments_of(one), timeout=timeout)))
            if len(sent) >= ahead:
                yield await self._awaited(sent.popleft(), timeout)
        while sent:
            yield await self._awaited(sent.popleft(), timeout)

    async def evaluate(self, *batch: Any, timeout: float | None = None, **named: Any) -> torch.Tensor:
        """Return the loss of a batch in the mode for evaluation, with the parameters of the server."""
        return await self._do(partial(self._trainer.evaluate, *batch, timeout=timeout, **named))

    async def predict(self, *inputs: Any, timeout: float | None = None, **named: Any) -> Any:
        """Return the module's output in the mode for evaluation, with the parameters of the server."""
        return await self._do(partial(self._trainer.predict, *inputs, timeout=timeout, **named))

    # State

    async def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the module's state as the server has it; the module itself stays as it is."""
        return await self._do(self._trainer.state_dict)

    async def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in torch's form, and write it into the optimizer."""
        return await self._do(self._trainer.optimizer_state_dict)

    async def load_state_dict(
        self, state: Mapping[str, Any], optimizer_state: Mapping[str, Any] | None = None
    ) -> None:
        """Load a module's state, and an optimizer's, into module and optimizer and on the server."""
        await self._do(partial(self._trainer.load_state_dict, state, optimizer_state))

    async def sync(self) -> None:
        """Write the server's state into the module and the optimizer."""
        await self._do(self._trainer.sync)

    async def checkpoint(self) -> hg.Checkpoint:
        """Return the elements of all variables, which `save` writes to a file."""
        return await self._do(self._trainer.checkpoint)

    async def restore(self, checkpoint: hg.Checkpoint) -> None:
        """Set the server's state to a checkpoint's."""
        await self._do(partial(self._trainer.restore, checkpoint))

    async def close(self) -> None:
        """Close the trainer, after the calls that have begun."""
        if not self._is_closed:
            self._is_closed = True
            closing = asyncio.get_running_loop().run_in_executor(self._thread, self._trainer.close)
            self._thread.shutdown(wait=False)
            await closing

    async def _do(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in the thread."""
        if self._is_closed:
            raise hg.InvalidArgumentError("the trainer is closed", advice="make a new one")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _awaited(self, sent: SentStep, timeout: float | None) -> torch.Tensor:
        try:
            return await self._do(partial(sent.result, timeout))
        except asyncio.CancelledError:
            sent.cancel()
            raise


async def _each(batches: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(batches, AsyncIterable):
        async for one in batches:
            yield one
    else:
        for one in batches:
            yield one
