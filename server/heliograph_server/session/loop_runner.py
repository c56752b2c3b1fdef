"""Running loops: a plan's outputs are fed back to its inputs, step by step, on a queue's thread.

A carried value has two tensors, and each step writes the one that it does not read:

    step 0: given ─▸ A      step 1: A ─▸ B      step 2: B ─▸ A      ...

So no step copies, and every step is bound before the first one runs. If the number of steps is
fixed, the last step writes the client's tensors; otherwise a copy at the end may be needed. A step
with a feed reads fed inputs from tensors of their own (`fed_inputs.py`); the others pay nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from heliograph_backends.contract import Abort, Tensor, access
from heliograph_proto.errors import CancelledError, HeliographError
from heliograph_proto.types import TensorType
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.plans.multi_device import MultiDevicePlan, Observe
from heliograph_server.resources.handles import TensorHandle
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.session.fed_inputs import FedInputs
from heliograph_server.session.protocol.instructions import RunTask
from heliograph_server.session.taps import LoopObserver

#: The time after which a loop gives its turn on the device to others.
TURN_SECONDS = 0.0005

Inputs: TypeAlias = Sequence[Tensor]
Outputs: TypeAlias = Sequence[Tensor | None]


class LoopRun:
    """One loop of a plan, given the inputs of its first step and the requested outputs.

    Allocates memory for carried values and for those inspected between steps. The plan's copy keeps
    or frees it as it does for a run. Raises OutOfMemoryError.
    """

    def __init__(self, loaded: LoadedPlan, task: RunTask, inputs: Inputs, outputs: Outputs) -> None:
        assert task.command.loop is not None and task.progress is not None
        self._loaded, self._task, self._loop = loaded, task, task.command.loop
        self._progress = task.progress
        self._copy = loaded.copies[task.slot]
        self._requested = outputs
        self._mailbox = self._progress.mailbox
        self._fed_inputs: FedInputs | None = None
        if self._mailbox is not None:
            self._fed_inputs = FedInputs(self._copy, self._loop, task.plan.inputs)
            inputs = self._fed_inputs.lasting(inputs)
        #: The inputs of the present step, if feeds changed them.
        self._changed: Inputs | None = None
        home, other = self._sides(outputs)
        # The last step is known if no output can end the loop early.
        at_home = (self._loop.steps - 1) % 2 if self._loop.until is None else 0
        self._outputs = (other, home) if at_home else (home, other)
        again = self._near(inputs)
        fed = [self._fed(again, self._outputs[1 - side]) for side in (0, 1)]
        self._bound = [(fed[side], self._outputs[side]) for side in (0, 1)]
        self._first = (inputs, self._outputs[0])
        self._flag = bytearray(0 if self._loop.until is None else self._type(self._loop.until).nbytes)

    def __repr__(self) -> str:
        return f"<LoopRun {self._loaded}: {self.done} of {self._loop.steps} steps>"

    @property
    def done(self) -> int:
        """The number of completed steps."""
        return self._progress.done

    def _type(self, output: int) -> TensorType:
        return self._task.plan.outputs[output].type

    def _sides(self, outputs: Outputs) -> tuple[Outputs, Outputs]:
        """The outputs of even and of odd steps. Only those of carried values differ."""
        loop, home = self._loop, list(outputs)
        carried = dict.fromkeys(one.output for one in loop.carries)
        inspected = () if loop.until is None else (loop.until,)
        for place in (*carried, *inspected, *loop.taps):
            if home[place] is None:
                home[place] = self._copy.home_for(place, self._type(place))
        other = list(home)
        for place in carried if loop.steps > 1 else ():
            other[place] = self._copy.other_for(place, self._type(place))
        return home, other

    def _near(self, inputs: Inputs) -> Inputs:
        """The inputs of all steps but the first.

        An input on another device is copied once, and not in each step, unless steps assign to it.
        """
        if isinstance(self._copy.plan, MultiDevicePlan) or self._loop.steps == 1:
            return inputs
        carried = {one.input for one in self._loop.carries}
        changing = {one.storage for one in self._task.plan.assigned}
        found = list(inputs)
        for place, given in enumerate(self._task.inputs):
            lasts = not isinstance(given, TensorHandle) or given.storage not in changing
            if lasts and place not in carried and not self._copy.is_near(inputs[place]):
                found[place] = self._copy.near_for(place, inputs[place].type)
                access.copy(inputs[place], found[place])
        return found

    def _fed(self, inputs: Inputs, outputs: Outputs) -> Inputs:
        """The inputs of a step that follows one with these outputs."""
        found = list(inputs)
        for carry in self._loop.carries:
            tensor = outputs[carry.output]
            assert tensor is not None
            found[carry.input] = tensor
        return found

    def run(self, observer: LoopObserver, abort: Abort, room: MemoryReclaim | None) -> None:
        """Run all steps. With `room`, a step that finds no memory is tried once more.

        Raises the errors of step `done`, and CancelledError after an abort.
        """
        observe = self._loaded.observing(observer) if self._loaded.is_observed else None
        turn = partial(self._turn, observer, observe, abort)
        while not self._is_complete():
            turn() if room is None else room.for_work(turn)
            for place in self._loop.taps:
                tensor = self._outputs[(self.done - 1) % 2][place]
                assert tensor is not None
                observer.output(place, tensor, abort)

    def _turn(self, observer: LoopObserver, observe: Observe | None, abort: Abort) -> None:
        """Run one or several steps in one turn on the device.

        Entering the device costs more than a small step. A turn ends after TURN_SECONDS, so that
        other tenants wait no longer, and before a step's outputs are sent.
        """
        # A plan that may take long can give the turn to others; a short one ends before.
        is_long = self._loaded.expected_us > TURN_SECONDS * 1e6
        begun = ended = time.perf_counter()
        first = self.done
        has_mailbox = self._mailbox is not None
        with self._copy.turn(abort) as turn:
            while self.done == first or not (self._loop.taps or self._is_complete()):
                if abort.is_set:
                    raise CancelledError("the loop was cancelled")
                observer.step = self.done
                inputs, outputs = self._bound[self.done % 2] if self.done else self._first
                if has_mailbox:
                    inputs = self._with_feeds(observer, inputs)
                self._copy.compute(inputs, outputs, abort, observe, turn=turn if is_long else None)
                self._progress.done += 1
                self._changed = None
                ended = time.perf_counter()
                if ended - begun > TURN_SECONDS:
                    break
        self._loaded.note(self._task.slot, (ended - begun) * 1e6 / (self.done - first))

    def _with_feeds(self, observer: LoopObserver, inputs: Inputs) -> Inputs:
        """The inputs of the present step, after the feeds that it takes.

        A step that is tried once more keeps those that it took, and takes no others.
        """
        assert self._mailbox is not None and self._fed_inputs is not None
        if self._mailbox.waiting and self._changed is None:
            self._changed = self._fed_inputs.apply(observer.take_feeds(self.done), inputs)
        return inputs if self._changed is None else self._changed

    def _is_complete(self) -> bool:
        """True if no step is to follow the last one."""
        return self.done > 0 and (self.done >= self._loop.steps or self._progress.stops or self._is_over())

    def _is_over(self) -> bool:
        """True if the `until` output of the last step is not zero."""
        if self._loop.until is None:
            return False
        tensor = self._outputs[(self.done - 1) % 2][self._loop.until]
        assert tensor is not None
        access.read(tensor, 0, memoryview(self._flag))
        return any(self._flag)

    def results(self) -> Outputs:
        """Return the outputs of the last step, copied to the requested tensors."""
        last = self._outputs[(self.done - 1) % 2]
        for place in (one.output for one in self._task.outputs if one.tensor or one.into):
            requested, found = self._requested[place], last[place]
            if requested is not None and found is not None and found is not requested:
                access.copy(found, requested)
        return last


def in_step(number: int, error: HeliographError) -> HeliographError:
    """Return an error of a loop with the number of its step."""
    message = f"in step {number} of the loop: {error.message}"
    return type(error)(message, advice=error.advice, origin=error.origin)
