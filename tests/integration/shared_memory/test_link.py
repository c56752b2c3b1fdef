"""The measured rate of a link, and the transfers that are packed because of it."""

from __future__ import annotations

import pytest

import heliograph as hg
from heliograph.transport.bulk import link
from heliograph.transport.bulk.link import CallMeter, Link, check_compression
from heliograph_proto.addresses import parse_address
from heliograph_proto.codec.packing import Encoding
from heliograph_proto.sessions import Limits, SessionInfo

MIB = 2**20


def far(compression: link.CompressionArgument = "auto", url: str = "grpc://192.0.2.1:7070") -> Link:
    """A link to another host, whose server packs."""
    info = SessionInfo(b"s", 1, ("packing", "zstd"), Limits(), b"", "", ())
    return Link(parse_address(url), info, compression)


def test_a_link_is_measured_before_anything_is_packed() -> None:
    one = far()
    assert one.up is None and one.packer(8 * MIB) is not None
    assert one.download_rate(8 * MIB) is None
    one.sent(2 * MIB, 0.2)
    assert one.up == pytest.approx(10 * MIB)
    assert one.download_rate(8 * MIB) == 10 * MIB


def test_many_bytes_count_however_fast_they_went() -> None:
    one = far()
    one.sent(4 * MIB, 0.001)
    assert one.packer(8 * MIB) is None


def test_short_uploads_are_measured_together() -> None:
    """On a fast link each would otherwise go in pieces that nothing packs."""
    fast, slow = far(), far()
    for _ in range(3):
        fast.sent(MIB, 0.001)
        assert fast.packer(MIB) is not None
    fast.sent(MIB, 0.001)
    assert fast.packer(MIB) is None
    slow.sent(64 * 1024, 0.01)
    assert slow.up is None
    slow.sent(64 * 1024, 0.01)
    assert slow.up == pytest.approx(128 * 1024 / 0.02)


def test_downloads_that_wait_for_packing_make_no_link_slow() -> None:
    one = far()
    one.received(8 * MIB, 0.1)
    for _ in range(2 * link.MEASUREMENTS):
        one.received(MIB, 0.1, is_packed=True)
        assert one.download_rate(8 * MIB) == 80 * MIB
    one.received(10 * MIB, 0.1, is_packed=True)
    assert one.download_rate(8 * MIB) == 100 * MIB


def test_a_fast_link_is_left_alone() -> None:
    one = far()
    one.sent(4 * MIB, 0.004)
    assert one.packer(64 * MIB) is None and one.download_rate(64 * MIB) is None
    # An upload that has begun goes on as it is.
    assert one.up is None


def test_a_moment_of_a_busy_machine_makes_no_link_slow() -> None:
    one = far()
    one.sent(4 * MIB, 0.004)
    for _ in range(link.MEASUREMENTS - 1):
        one.sent(4 * MIB, 1.0)
        assert one.packer(64 * MIB) is None
    one.sent(4 * MIB, 1.0)
    assert one.packer(64 * MIB) is not None


def test_each_way_has_its_own_rate_once_it_is_measured() -> None:
    one = far()
    one.sent(2 * MIB, 0.2)
    one.received(4 * MIB, 0.001)
    assert one.packer(8 * MIB) is not None and one.download_rate(8 * MIB) is None


def test_small_transfers_and_servers_on_this_host_are_left_alone() -> None:
    assert far().packer(MIB - 1) is None
    for url in ("grpc://127.0.0.1:7070", "unix:///run/heliograph.sock"):
        assert far(url=url).packer(8 * MIB) is None
        assert far("on", url).packer(8 * MIB) is not None


def test_on_packs_at_any_rate_and_off_at_none() -> None:
    on, off = far("on"), far("off")
    for one in (on, off):
        one.sent(4 * MIB, 0.001)
    assert on.up == 0.0 and on.download_rate(8 * MIB) == 0
    assert on.encodings == (Encoding.UPPER_HALVES, Encoding.PLANES_ZSTD)
    assert off.packer(8 * MIB) is None and not off.encodings


def test_a_call_is_measured_once_its_buffers_are_full() -> None:
    one = far()
    meter = CallMeter(one)
    for _ in range(link.BUFFERED_BYTES // MIB - 1):
        meter.took(MIB, 10.0)
    assert one.up is None
    for _ in range(4):
        meter.took(MIB, 0.1)
    assert one.up == pytest.approx(10 * MIB)


def test_other_words_are_refused() -> None:
    assert check_compression("off") == "off"
    with pytest.raises(hg.InvalidArgumentError, match="auto, on, off"):
        check_compression("gzip")  # type: ignore[arg-type]
