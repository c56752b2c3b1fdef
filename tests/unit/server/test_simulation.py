"""Simulated sessions, turns and edges: invariants hold whatever the schedule, and planted bugs are found."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest
from simulation import move
from simulation.edges import SimulatedEdge
from simulation.keeping import SimulatedKeeping
from simulation.lease import SimulatedLease
from simulation.move import SimulatedMove
from simulation.session import SimulatedSession
from simulation.turns import SimulatedTurns
from simulation.values import SimulatedValues
from simulation.world import Violation

from heliograph.core import credit
from heliograph.core.effects import Compute
from heliograph.procedures.moving import Moving
from heliograph_proto.errors import HandleExistsError
from heliograph_server.exchange import ledger, outgoing
from heliograph_server.links import requests
from heliograph_server.resources import fair_queue, handles
from heliograph_server.rpc.leases import attaching
from heliograph_server.runtime import keeper, whereabouts
from heliograph_server.session.protocol import core, dependencies, transfer_state

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (SimulatedSession, 150),
        (SimulatedTurns, 200),
        (SimulatedEdge, 100),
        (SimulatedLease, 40),
        (SimulatedMove, 200),
        (SimulatedKeeping, 100),
        (SimulatedValues, 100),
    ],
)
def test_whatever_the_schedule_the_invariants_hold(kind: Any, count: int) -> None:
    first = secrets.randbits(40)
    print(f"seed {first}")
    for seed in range(first, first + count):
        try:
            kind(seed).run()
        except Exception as error:
            raise AssertionError(f"{kind.__name__}({seed}).run()") from error


def test_a_seed_replays_its_schedule() -> None:
    one, again = SimulatedSession(20_250_314), SimulatedSession(20_250_314)
    assert one.run() == again.run()
    assert repr(one.server.reports) == repr(again.server.reports)


def _without_readers(patch: pytest.MonkeyPatch) -> None:
    """A writer does not wait for earlier readers."""
    real = dependencies.enter_storages

    def enter(state: dependencies.CommandState) -> None:
        for target in state.targets:
            if target.storage is not None:
                target.storage.readers.clear()
        real(state)

    patch.setattr(core, "enter_storages", enter)


def _without_poison(patch: pytest.MonkeyPatch) -> None:
    """A failed command leaves its bytes as if they were good."""
    patch.setattr(handles.TensorHandle, "poison", lambda *_: None)


def _poison_by_later_commands(patch: pytest.MonkeyPatch) -> None:
    """A command fails for a later one that was cancelled."""
    real = handles.TensorHandle.problem
    patch.setattr(handles.TensorHandle, "problem", lambda self, _=0: real(self))


def _credit_twice(patch: pytest.MonkeyPatch) -> None:
    """A client counts returned credit twice."""
    real = credit.Credit.give_back

    def give_back(self: credit.Credit, size_bytes: int) -> None:
        real(self, size_bytes + 64 if size_bytes == 1024 else size_bytes)

    patch.setattr(credit.Credit, "give_back", give_back)


def _uploads_stay(patch: pytest.MonkeyPatch) -> None:
    """The bytes of a command that has ended stay staged."""
    patch.setattr(transfer_state.TransferState, "release", lambda *_: None)


def _turns_by_arrival(patch: pytest.MonkeyPatch) -> None:
    """Device time is not charged, so turns go to whoever is first in the table."""
    patch.setattr(fair_queue.FairQueue, "_give", staticmethod(lambda flow, _, seconds: flow.had(seconds)))


def _forgotten_tags(patch: pytest.MonkeyPatch) -> None:
    """A tenant between two runs loses its place when another one is forgotten."""
    real = fair_queue.FairQueue._forget

    def forget(self: fair_queue.FairQueue, flow: fair_queue.FairFlow, now: float) -> None:
        real(self, flow, now)
        self._virtual = max([self._virtual, *self._ahead.values()])
        self._ahead.clear()

    patch.setattr(fair_queue.FairQueue, "_forget", forget)


def _value_twice(patch: pytest.MonkeyPatch) -> None:
    """A value that was given away can be requested again after its stream broke."""
    real = ledger.Ledger.give

    def give(self: Any, run: int, payload: Any) -> Any:
        found = real(self, run, payload)
        if not isinstance(found, ledger.Disposition):
            self._states[run] = ledger._Given(payload)
        return found

    patch.setattr(ledger.Ledger, "give", give)


def _values_that_left_are_freed(patch: pytest.MonkeyPatch) -> None:
    """A small value is given up once it was sent, whether or not it arrived."""
    patch.setattr(
        outgoing.GivenAnswers, "add", lambda self, value: value and value.acknowledge(value.size_bytes)
    )


def _the_first_request_counts(patch: pytest.MonkeyPatch) -> None:
    """A request that comes again does not take the place of the one whose connection broke."""
    real = ledger.Ledger.show
    patch.setattr(
        ledger.Ledger, "show", lambda self, run, shown, waiter, attempt=0: real(self, run, shown, waiter)
    )


def _requests_go_once(patch: pytest.MonkeyPatch) -> None:
    """What waits is not asked for again after a break."""
    real = requests.LinkRequests.begin

    def begin(self: requests.LinkRequests) -> None:
        waiting, self.waiting = self.waiting, {}
        real(self)
        self.waiting = waiting

    patch.setattr(requests.LinkRequests, "begin", begin)


def _receipts_go_once(patch: pytest.MonkeyPatch) -> None:
    """A receipt that the other daemon waits for is not sent again after a break."""
    real = requests.LinkRequests.broke

    def broke(self: requests.LinkRequests) -> None:
        real(self)
        for number, one in list(self.waiting.items()):
            if isinstance(one, requests.Receipt):
                del self.waiting[number]

    patch.setattr(requests.LinkRequests, "broke", broke)


def _commands_pass_the_move(patch: pytest.MonkeyPatch) -> None:
    """A client moves its session while commands are under way."""

    def settle(self: Moving) -> Any:
        yield Compute(lambda: None)

    patch.setattr(Moving, "settle", settle)
    patch.setattr(move._Session, "is_at_rest", True)


def _secret_of_the_first_daemon(patch: pytest.MonkeyPatch) -> None:
    """The copy at the other daemon has the session's old secret."""
    patch.setattr(move, "moved_secret", lambda token, proof: token)


def _forgotten_places(patch: pytest.MonkeyPatch) -> None:
    """A daemon does not tell where a session went."""
    patch.setattr(whereabouts.Departures, "where", lambda *_: None)


def _unwritten_messages(patch: pytest.MonkeyPatch) -> None:
    """A client is given messages that its restarted daemon never wrote."""
    patch.setattr(attaching.Attaching, "received", lambda self, attach: attach.received)


def _calls_of_ended_streams(patch: pytest.MonkeyPatch) -> None:
    """A keeper takes calls of any epoch."""

    def state(self: keeper.Keeper, tenant: str, name: str, epoch: int) -> keeper.State:
        if (tenant, name) not in self._states:
            raise HandleExistsError("there is no state")
        return self._states[tenant, name]

    patch.setattr(keeper.Keeper, "_state", state)


def _states_of_the_cut_off(patch: pytest.MonkeyPatch) -> None:
    """A keeper gives a state away as soon as its owner is silent, and forgets whose it was."""
    real = keeper.Keeper.hold

    def taken(self: keeper.Keeper, *how: Any) -> keeper.Ownership:
        for one in self._states.values():
            one.hold = None
        return real(self, *how)

    patch.setattr(keeper.Keeper, "hold", taken)


def _owners_by_their_last_answer(patch: pytest.MonkeyPatch) -> None:
    """A keeper takes an owner that missed an answer for another one."""
    real = keeper.Keeper.hold

    def known(
        self: keeper.Keeper, tenant: str, name: str, owner: bytes, epoch: int, *how: Any
    ) -> keeper.Ownership:
        found = self._states.get((tenant, name))
        if found is not None and epoch and epoch != found.epoch:
            raise keeper.TakenOverError("another daemon has taken over")
        return real(self, tenant, name, owner, epoch, *how)

    patch.setattr(keeper.Keeper, "hold", known)


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        (SimulatedSession, _without_readers),
        (SimulatedSession, _without_poison),
        (SimulatedSession, _poison_by_later_commands),
        (SimulatedSession, _credit_twice),
        (SimulatedSession, _uploads_stay),
        (SimulatedTurns, _turns_by_arrival),
        (SimulatedTurns, _forgotten_tags),
        (SimulatedEdge, _value_twice),
        (SimulatedValues, _values_that_left_are_freed),
        (SimulatedValues, _the_first_request_counts),
        (SimulatedValues, _requests_go_once),
        (SimulatedValues, _receipts_go_once),
        (SimulatedMove, _commands_pass_the_move),
        (SimulatedMove, _secret_of_the_first_daemon),
        (SimulatedMove, _forgotten_places),
        (SimulatedMove, _unwritten_messages),
        (SimulatedKeeping, _calls_of_ended_streams),
        (SimulatedKeeping, _states_of_the_cut_off),
        (SimulatedKeeping, _owners_by_their_last_answer),
    ],
)
def test_a_planted_bug_is_found(kind: Any, plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(2000):
            kind(seed).run()
