"""Parts of a graph that run on several daemons at once, and the edges by which values go between them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest

from heliograph_proto.errors import HeliographError, InvalidArgumentError, MemberLostError

EDGE_BYTES = 16
SECRET_BYTES = 32
CAPABILITY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Edge:
    """The way of a value from one daemon to another, as both ends know it."""

    name: bytes
    secret: bytes

    def __post_init__(self) -> None:
        if len(self.name) != EDGE_BYTES or len(self.secret) != SECRET_BYTES:
            raise InvalidArgumentError(
                f"an edge has a name of {EDGE_BYTES} bytes and a secret of {SECRET_BYTES}, "
                f"not {len(self.name)} and {len(self.secret)}"
            )

    def __repr__(self) -> str:
        return f"<Edge {self.name.hex()[:8]}>"

    def capability(self, run: int) -> bytes:
        """What whoever gets or brings the value of a run shows, once."""
        message = self.name + run.to_bytes(8, "little")
        return blake2b(message, digest_size=CAPABILITY_BYTES, key=self.secret).digest()

    def allows(self, run: int, capability: bytes) -> bool:
        """Whether this is the capability of a run; takes the same time for any."""
        return compare_digest(self.capability(run), capability)


@dataclass(frozen=True, slots=True)
class Source:
    """A daemon that values are pulled from, in one of its lives."""

    address: str
    incarnation: bytes


def lost(source: Source, why: str) -> MemberLostError:
    """Whoever exchanges values with a daemon found it gone."""
    return MemberLostError(
        f"{_loss_of(source)}: {why}", advice="compile for the members that are left, or wait until it is back"
    )


def is_loss(error: HeliographError, source: Source) -> bool:
    """Whether an error, perhaps from another daemon, is that it found this one gone (`lost`)."""
    return isinstance(error, MemberLostError) and error.message.startswith(_loss_of(source))


def _loss_of(source: Source) -> str:
    return f"the member at {source.address} is lost"


@dataclass(frozen=True, slots=True)
class Arrival:
    """An input of a portion, by its value number, that another daemon makes during the run."""

    leaf: int
    edge: Edge
    #: None: the value is pushed here.
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class Departure:
    """A node of a portion whose result another daemon reads during the run."""

    node: int
    edge: Edge


@dataclass(frozen=True, slots=True)
class Portion:
    """How a part of a graph exchanges values with the other parts while it runs."""

    arrivals: tuple[Arrival, ...] = ()
    departures: tuple[Departure, ...] = ()
    #: Nodes with which a split begins.
    begins: frozenset[int] = frozenset()
