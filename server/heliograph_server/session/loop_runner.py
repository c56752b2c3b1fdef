"""Running loops: a plan's outputs are fed back to its inputs, step by step, on a queue's thread.

A carried value has two tensors, and each step writes the one that it does not read:

    step 0: given ─▸ A      step 1: A ─▸ B      step 2: B ─▸ A      ...

So no step copies, and every step is bound before the first one runs. If the number of steps is
fixed, the last step writes the client's tensors; otherwise a copy at the end may be needed. A step
with a feed reads fed inputs from tensors of their own (`fed_inputs.py`); the others pay nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from heliograph_backends.contract import Abort, Tensor, access
from heliograph_proto.commands import FeedLoop
from heliograph_proto.errors import CancelledError, DeadlineExceededError, HeliographError
from heliograph_proto.types import TensorType
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.plans.multi_device import MultiDevicePlan, Observe
from heliograph_server.resources.feed_order import ToldFeeds
from heliograph_server.resources.handles import TensorHandle
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.session.fed_inputs import FedInputs
from heliograph_server.session.parts.edges import LoopState
from heliograph_server.session.protocol.instructions import RunTask
from heliograph_server.session.step_links import StepLinks
from heliograph_server.session.taps import LoopObserver

#: The time after which a loop gives its turn on the device to others.
TURN_SECONDS = 0.0005
#: The time in which a feed comes that another partition has, and told of.
FEED_SECONDS = 30.0

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
        #: For a partition: the run of the first step; else 0.
        self._first_run = task.command.exchange_run
        self._fed_inputs: FedInputs | None = None
        if self._mailbox is not None:
            self._fed_inputs = FedInputs(self._copy, self._loop, task.plan.inputs)
            inputs = self._fed_inputs.lasting(inputs)
        #: The inputs of the present step, if feeds changed them.
        self._changed: Inputs | None = None
        #: The values of the last step that are to be sent.
        self._unsent = 0
        #: For a partition: the feeds of the next step.
        self._given: Sequence[FeedLoop] = ()
        home, other = self._sides(outputs)
        # The last step is known if no output can end the loop early.
        at_home = (self._loop.steps - 1) % 2 if self._loop.until is None else 0
        self._outputs = (other, home) if at_home else (home, other)
        again = self._near(inputs)
        fed = [self._fed(again, self._outputs[1 - side]) for side in (0, 1)]
        self._links: StepLinks | None = None
        if self._loop.exchange is not None:
            self._links = StepLinks(
                self._copy, self._loop.exchange, self._first_run, task.plan.inputs, task.plan.outputs
            )
            fed = [self._links.fed(fed[side], side) for side in (0, 1)]
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
        given: tuple[int, ...] = () if loop.exchange is None else loop.exchange.given
        for place in (*carried, *inspected, *loop.taps, *given):
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
        if self._links is not None:
            self._run_linked(self._links, turn, observer, abort)
            return
        observer.loop = None if observe else self
        if self._unsent:
            observer.step = self.done - 1
            self._send_taps(observer, abort)
        while not self._is_complete():
            turn() if room is None else room.for_work(turn)
            observer.count(self.done)
            self._unsent = len(self._loop.taps)
            self._send_taps(observer, abort)
            if not self._is_complete():
                observer.at_edge(abort)

    @property
    def may_be_held(self) -> bool:
        """False once it was fed: feeds cannot be taken again."""
        return self.done > 0 and not (self._mailbox is not None and self._mailbox.last)

    def state(self) -> LoopState:
        """Return a copy of its state between two steps."""
        last = self._outputs[(self.done - 1) % 2]
        copies = {
            place: bytes(access.read_whole(tensor)) for place, tensor in enumerate(last) if tensor is not None
        }
        return LoopState(self.done, self._unsent, copies)

    def go_on_from(self, state: LoopState) -> None:
        """Begin after the steps of a state, with the outputs of the last one."""
        self._progress.done = state.steps
        self._unsent = min(state.unsent, len(self._loop.taps))
        last = self._outputs[(self.done - 1) % 2]
        for place, data in state.outputs.items():
            if place < len(last) and (tensor := last[place]) is not None:
                access.write(tensor, 0, memoryview(data))

    def _run_linked(
        self, links: StepLinks, turn: Callable[[], None], observer: LoopObserver, abort: Abort
    ) -> None:
        """Run the steps of a partition, together with those of the others."""
        follows, most = True, self._loop.steps
        plan = self._copy.plan
        assert isinstance(plan, MultiDevicePlan)
        plan.expect_runs(self._first_run + most - 1)
        try:
            while follows:
                links.begin(self.done, most)
                turn()
                observer.count(self.done)
                is_last = self.done == most
                follows = not (is_last or (links.decides and self._is_complete()))
                if not is_last:
                    feeds = self._take_given(observer, None) if links.decides and follows else ToldFeeds()
                    links.give(self._outputs[(self.done - 1) % 2], abort, feeds, follows=follows)
                self._unsent = len(self._loop.taps)
                self._send_taps(observer, abort)
                plan.end_run()
                if follows:
                    with observer.outside():
                        follows = links.follows(abort)
                        if follows and links.told_feeds is not None:
                            self._hear(observer, links.told_feeds, abort)
        except BaseException as error:
            links.end(error)
            raise
        finally:
            plan.expect_runs(0)
        links.end(None)

    def _take_given(self, observer: LoopObserver, told: ToldFeeds | None) -> ToldFeeds:
        """Take the feeds of a partition's next step: those that wait, or those that another one
        told. Return what to tell others."""
        if self._mailbox is None or not (self._mailbox.waiting if told is None else told.through):
            return ToldFeeds()
        self._given, found = observer.take_feeds(self.done, told)
        return found

    def _hear(self, observer: LoopObserver, told: ToldFeeds, abort: Abort) -> None:
        """Take the feeds that another partition told, as soon as they are here."""
        mailbox = self._mailbox
        if mailbox is not None and told.through:
            if not observer.wait_until(lambda: mailbox.last >= told.through, abort, FEED_SECONDS):
                raise _feed_missing(mailbox.last + 1)
            if mailbox.last < told.through:
                raise CancelledError("the loop was cancelled")
            self._take_given(observer, told)

    def _send_taps(self, observer: LoopObserver, abort: Abort) -> None:
        """Send the values of the last step that were not sent."""
        for place in self._loop.taps[len(self._loop.taps) - self._unsent :]:
            tensor = self._outputs[(self.done - 1) % 2][place]
            assert tensor is not None
            observer.output(place, tensor, abort)
            self._unsent -= 1

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
            self._copy.times.waited_us += (time.perf_counter() - begun) * 1e6
            while self.done == first or not (self._loop.taps or self._links or self._is_complete()):
                if abort.is_set:
                    raise CancelledError("the loop was cancelled")
                observer.step = self.done
                inputs, outputs = self._bound[self.done % 2] if self.done else self._first
                if has_mailbox:
                    inputs = self._with_feeds(observer, inputs)
                run = self._first_run and self._first_run + self.done
                self._copy.compute(inputs, outputs, abort, observe, run, turn if is_long else None)
                self._progress.done += 1
                self._changed = None
                ended = time.perf_counter()
                if ended - begun > TURN_SECONDS:
                    break
        steps = self.done - first
        self._loaded.note(self._task.slot, (ended - begun) * 1e6 / steps, steps)

    def _with_feeds(self, observer: LoopObserver, inputs: Inputs) -> Inputs:
        """The inputs of the present step, after the feeds that it takes.

        A step that is tried once more keeps those that it took, and takes no others.
        """
        assert self._mailbox is not None and self._fed_inputs is not None
        if self._links is None and self._mailbox.waiting and self._changed is None:
            self._given, _ = observer.take_feeds(self.done, None)
        if self._given:
            self._changed, self._given = self._fed_inputs.apply(self._given, inputs), ()
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

    @staticmethod
    def explain(step: int, error: HeliographError) -> HeliographError:
        """Return an error of the loop with the number of its step."""
        return in_step(step, error)


def _feed_missing(number: int) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"feed {number} of the loop, which other hosts have, did not come within {FEED_SECONDS:g} s",
        advice="the head answers its members and lost this message: its log may say why",
    )


def in_step(number: int, error: HeliographError) -> HeliographError:
    """Return an error of a loop with the number of its step."""
    message = f"in step {number} of the loop: {error.message}"
    return type(error)(message, advice=error.advice, origin=error.origin)
