"""A pool in a client's own process."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph._channels import NO_CREDENTIALS
from heliograph_backends.registry import Registry
from heliograph_proto.credentials import Credentials
from heliograph_proto.errors import UnavailableError
from heliograph_server.core.runtime import Host
from heliograph_server.peers.blocking import BlockingPeers
from heliograph_server.pool.pool import Pool
from heliograph_server.pool.sources import StaticSource


def open_pool_of(urls: Sequence[str], timeout: float, credentials: Credentials = NO_CREDENTIALS) -> Host:
    """A host with the devices of these daemons alone, which are all shown the same, once all have answered
    that do at once.

    Raises ConfigurationError for two of one name, and UnavailableError when none has answered after `timeout`
    seconds, which says why of each.
    """
    pool = Pool(StaticSource.parse(",".join(urls)), shown=lambda _: credentials)
    host = Host(Registry(), pool=pool)
    host.exchange.use(BlockingPeers(shown=lambda _: credentials))
    try:
        pool.wait(lambda one: bool(one.devices) and one.is_settled, timeout)
        if not pool.devices:
            whys = "; ".join(f"{one.name}: {one.why}" for one in pool.members)
            raise UnavailableError(f"no daemon of the pool answers: {whys}", advice="start one of them")
    except BaseException:
        host.close()
        raise
    return host
