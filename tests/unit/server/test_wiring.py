"""What a head makes of partitions that lost each other."""

from __future__ import annotations

from heliograph_backends.contract import Site, SitePlan, SiteWork
from heliograph_proto.errors import HeliographError, MemberLostError, OutOfRangeError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import PeerSource, lost
from heliograph_server.plans.wiring import unreachable, wire
from heliograph_server.scheduler.partitions import Crossing, PartitionGraph, Partitions


class Host(Site):
    """A host that is there, or is known to be lost."""

    why_not = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_lost = False

    def __repr__(self) -> str:
        return f"<Host {self.name}>"

    @property
    def address(self) -> str:
        return f"grpc://{self.name}:7070"

    @property
    def incarnation(self) -> bytes:
        return self.name.encode() * 16

    def compile(self, work: SiteWork) -> SitePlan:
        raise NotImplementedError

    def check(self) -> None:
        if self.is_lost:
            raise MemberLostError(f"{self.name} is lost")


def three() -> tuple[Partitions, list[Host]]:
    """Hosts a, b and c, of which a reads values of both others."""
    graph = Graph((), (), ())
    pieces = tuple(
        PartitionGraph(site, graph, (), (), (), (), (), frozenset(), frozenset()) for site in range(3)
    )
    crossings = Crossing(0, 1, 0, 0, 0, 4), Crossing(1, 2, 0, 0, 1, 4)
    return Partitions(pieces, crossings), [Host("a"), Host("b"), Host("c")]


def told(error: HeliographError, *gone: int) -> list[tuple[str, str]]:
    """Who does not reach whom, as the partition of `a` failed with an error."""
    partitions, hosts = three()
    for place in gone:
        hosts[place].is_lost = True
    wires = wire(partitions, hosts)
    return [(one.name, other.name) for one, other in unreachable(partitions, hosts, wires, 0, error)]


def loss_of(name: str) -> MemberLostError:
    return lost(PeerSource(f"grpc://{name}:7070", b""), "it ended the stream")


def test_only_the_host_that_was_not_found_is_not_reached_any_more() -> None:
    assert told(loss_of("b")) == [("a", "b")]
    assert told(loss_of("c")) == [("a", "c")]


def test_hosts_that_are_left_reach_each_other_though_a_third_is_lost() -> None:
    assert told(loss_of("c"), 2) == []
    assert told(MemberLostError("member a at grpc://a:7070 is lost: it ended the session")) == []


def test_an_error_of_a_node_is_no_loss() -> None:
    assert told(OutOfRangeError("index 7 is not one of 3 rows")) == []
