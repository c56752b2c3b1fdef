"""A state in another daemon's memory: the real keeper, and owners that are cut off, killed and replaced.

Each owner writes what it knows as a new file, names it, and drops the one before, by calls that arrive late
or twice, or not at all. Answers to owners get lost. Streams end on one
side before the other notices; the keeper restarts; time jumps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from heliograph_proto.codec.bulk import LEAST_PIECE_BYTES
from heliograph_proto.errors import (
    HandleExistsError,
    HeliographError,
    LimitExceededError,
    UnknownHandleError,
)
from heliograph_server.runtime.keeper import Coming, Keeper, Ownership, TakenOverError
from simulation.world import Wire, World, hold

KEEP_SECONDS, LIMIT_BYTES = 30.0, 20_000
#: The time after which a dead stream is noticed.
SILENCE_SECONDS = 5.0


@dataclass(eq=False)
class _Owner:
    """A daemon that holds the state, or wants to."""

    number: int
    keeper: bytes = b""
    epoch: int = 0
    held: Ownership | None = None
    is_over: bool = False
    #: By which its calls arrive.
    way: Wire | None = None

    @property
    def mark(self) -> bytes:
        return self.number.to_bytes(16, "little")


class SimulatedKeeping:
    """One keeper, and owners of one state after another."""

    def __init__(self, seed: int, actions: int = 120) -> None:
        self.world = World(seed)
        self._lives = 0
        self._restart()
        self.owners: list[_Owner] = []
        self._images = 0
        for number in range(actions):
            self.world.after(number * 0.5, self._act)

    def run(self) -> int:
        """Let everything happen. Return the number of events; raises Violation."""
        return self.world.run(self._check)

    def _restart(self) -> None:
        self._lives += 1
        self.keeper = Keeper(LIMIT_BYTES, KEEP_SECONDS, b"keeper %d" % self._lives)
        #: The epoch of the owner that was taken last.
        self._last_epoch = 0
        #: The number of the newest image that the keeper has, as far as an owner may rely on it.
        self._kept = 0
        #: The owner that was taken last.
        self._last: _Owner | None = None

    def _act(self) -> None:
        chance = self.world.chance
        living = [one for one in self.owners if not one.is_over]
        if not living or chance(0.1):
            self.owners.append(_Owner(len(self.owners) + 1))
            living.append(self.owners[-1])
        owner = self.world.random.choice(living)
        if owner.held is None:
            self._hold(owner)
        elif chance(0.15):
            self._cut(owner, is_over=chance(0.5))
        else:
            self._snapshot(owner)
        if chance(0.03):
            for one in self.owners:
                one.held = None
            self._restart()
        if chance(0.02):
            self.world.now += 2 * KEEP_SECONDS
        self.keeper.forget_due(self.world.now)
        if not self.keeper.states:
            self._kept = 0

    def _hold(self, owner: _Owner) -> None:
        epoch = owner.epoch if owner.keeper == self.keeper.identity else 0
        others = [one for one in self.owners if one is not owner and one.held is not None]
        live = [one for one in others if one.held.state.hold is one.held]  # type: ignore[union-attr]
        try:
            held = self.keeper.hold("", "state", owner.mark, epoch, b"", self.world.now)
        except TakenOverError:
            hold(self._last is not owner, "an owner is told of another, and there is none")
            owner.is_over = True
            return
        except HandleExistsError:
            is_held = bool(live) or any(one.hold for one in self.keeper.states)
            hold(is_held and self._last is not owner, "nobody else holds it")
            return
        hold(not live, "two owners hold the state")
        hold(held.epoch > self._last_epoch, "an epoch came again")
        self._last_epoch, self._last = held.epoch, owner
        if self.world.chance(0.2):
            # The stream breaks before its answers come.
            keeper = self.keeper
            self.world.soon(lambda: keeper.let_go(held, self.world.now), SILENCE_SECONDS)
            return
        owner.held, owner.epoch, owner.keeper = held, held.epoch, self.keeper.identity
        owner.way = Wire(self.world)
        images = sorted(int(one.partition("/")[2]) for one in held.state.files if one.startswith("image/"))
        hold(not any(one.startswith("parts/") for one in held.state.files), "a part is left")
        hold(max(images, default=0) >= self._kept, f"image {self._kept} was acknowledged, and is gone")

    def _cut(self, owner: _Owner, *, is_over: bool) -> None:
        """Its stream breaks, or it is killed; the keeper notices later. Calls under way may still come."""
        held, owner.held, owner.is_over = owner.held, None, is_over
        keeper = self.keeper
        assert held is not None
        if owner.way is not None and self.world.chance(0.5):
            owner.way.is_cut = True
        self.world.soon(lambda: keeper.let_go(held, self.world.now), SILENCE_SECONDS)

    def _snapshot(self, owner: _Owner) -> None:
        self._images += 1
        number, keeper, held, way = self._images, self.keeper, owner.held, owner.way
        assert held is not None and way is not None
        epoch, part = held.epoch, f"parts/{number}"
        data = memoryview(bytes(self.world.random.choice((10, 3000, 15_000))))

        def put() -> None:
            try:
                coming = keeper.begin("", "state", epoch, part, data.nbytes)
            except HeliographError:
                return
            is_torn = self.world.chance(0.1)
            piece = data[:LEAST_PIECE_BYTES] if is_torn else data
            try:
                coming.came(piece.nbytes)
                coming.keep(piece)
            except LimitExceededError:
                is_torn = True
            self.world.soon(coming.give_up if is_torn else partial(finish, coming))

        def finish(coming: Coming) -> None:
            try:
                coming.finish()
            except HandleExistsError:
                coming.give_up()
                return
            way.send(name)

        def name() -> None:
            try:
                keeper.rename("", "state", epoch, [(part, f"image/{number}")])
            except (HandleExistsError, UnknownHandleError):
                return
            hold(keeper is not self.keeper or epoch == self._last_epoch, "an earlier owner has written")
            if keeper is self.keeper:
                self._kept = max(self._kept, number)
            old = [f"image/{one}" for one in range(max(0, number - 20), number)]
            way.send(lambda: remove(old))

        def remove(old: list[str]) -> None:
            try:
                keeper.remove("", "state", epoch, old)
            except HandleExistsError:
                return
            hold(keeper is not self.keeper or epoch == self._last_epoch, "an earlier owner has removed")

        way.send(put)

    def _check(self) -> None:
        figures = self.keeper.figures()
        hold(0 <= figures.used_bytes <= LIMIT_BYTES, f"{figures.used_bytes} bytes are taken")
        hold(figures.held <= 1, "two owners hold the state")
        files = sum(one.charged_bytes for state in self.keeper.states for one in state.files.values())
        hold(files <= figures.used_bytes, "files take more than is counted")
