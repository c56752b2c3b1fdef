"""Registries in use: by a host's sessions, and by `local:` with a device of its own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plugin_files import write_plugin

import heliograph as hg
from heliograph_backends.registry import open_registry
from heliograph_proto.addresses import Address, parse_address
from heliograph_proto.devices import BufferRole
from heliograph_proto.errors import ConfigurationError, InvalidArgumentError, UnavailableError
from heliograph_server.runtime.host import Host

# A host


def test_a_host_tells_everything_of_its_devices(tmp_path: Path) -> None:
    specifications = ["fake:extra=2,alignment=128,max_size=1MiB,host=0", "cpu:threads=2", "sim:kind=gpu"]
    host = Host(open_registry(specifications, [str(write_plugin(tmp_path, "sim"))]))
    fake, cpu, sim = host.device_list().devices
    assert [(one.name, one.role) for one in fake.buffer_types] == [
        ("fake0", BufferRole.DEFAULT),
        ("fake0_extra0", BufferRole.EXTRA),
        ("fake0_extra1", BufferRole.EXTRA),
    ]
    default = fake.buffer_types[0]
    assert (default.alignment_bytes, default.max_size_bytes, default.is_host) == (128, 2**20, False)
    assert default.readable_by == ("fake0",)
    # The CPU's host memory is its default one: it is listed once.
    assert [one.role for one in cpu.buffer_types if one.name == "cpu0"] == [BufferRole.DEFAULT]
    assert cpu.buffer_types[0].readable_by == ("cpu0", "sim0")
    assert cpu.features["threads"] == "2" and (cpu.id, sim.id) == ("", "0000:c0:00.0")
    session = host.open_session("test")
    assert [one.name for one in session.devices] == ["fake0", "cpu0", "sim0"]
    assert session.devices[0].buffer_types == fake.buffer_types
    host.close()


def test_a_backend_is_unloaded_once_no_session_uses_it(tmp_path: Path) -> None:
    registry = open_registry(["cpu:threads=1", "sim"], [str(write_plugin(tmp_path, "sim"))])
    host = Host(registry)
    first, second = (host.session(host.open_session("test").session) for _ in range(2))
    first.close()
    first.close()
    with pytest.raises(ConfigurationError, match="'sim' is in use by 1 session"):
        registry.unload("sim")
    second.close()
    registry.unload("sim")
    assert [one.name for one in host.device_list().devices] == ["cpu0"]
    assert "sim" not in [one.name for one in host.device_list().backends]
    host.close()


def test_a_session_that_is_refused_uses_nothing() -> None:
    registry = open_registry(["fake"])
    host = Host(registry)
    host.drain()
    with pytest.raises(hg.DrainingError):
        host.open_session("test")
    registry.unload("fake")
    host.close()


def test_a_backend_that_is_loaded_later_serves_the_sessions_that_come_then(tmp_path: Path) -> None:
    registry = open_registry(["fake"])
    host = Host(registry)
    registry.load(str(write_plugin(tmp_path, "sim")))
    registry.start(["sim"])
    session = host.open_session("test")
    assert [one.name for one in session.devices] == ["fake0", "sim0"]
    host.close()


def test_a_host_whose_devices_are_all_gone_takes_no_session() -> None:
    registry = open_registry(["fake"])
    host = Host(registry)
    registry.unload("fake")
    with pytest.raises(UnavailableError, match="no devices left"):
        host.open_session("test")
    assert host.device_list().devices == ()
    host.close()


def test_a_host_without_a_device_says_why() -> None:
    with pytest.raises(ConfigurationError, match="there is no device"):
        Host(open_registry([]))


# Addresses


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("local:", Address("local")),
        ("local:#cpu0", Address("local", device="cpu0")),
        ("local:#cpu", Address("local", specification="cpu")),
        ("local:#cpu:threads=2", Address("local", specification="cpu:threads=2")),
        ("local:#sim2:", Address("local", specification="sim2:")),
        (
            "local:#remote:url=grpc://host:7070#cpu0",
            Address("local", specification="remote:url=grpc://host:7070#cpu0"),
        ),
        ("grpc://host:1#cpu0", Address("grpc", "host", 1, device="cpu0")),
    ],
)
def test_the_fragment_of_a_url_names_a_device_or_for_local_starts_one(url: str, expected: Address) -> None:
    assert parse_address(url) == expected
    assert parse_address(str(expected)) == expected


@pytest.mark.parametrize("url", ["grpc://host:1#cpu:threads=2", "unix:///x#cpu:memory=1GiB,threads=1"])
def test_a_daemon_starts_no_device_for_a_url(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not the name of a daemon's device") as caught:
        parse_address(url)
    assert "--device cpu:" in caught.value.advice


# In this process


def double(session: hg.Session) -> Any:
    g = hg.Graph()
    g.output("y", g.input("x", (3,), "f32") * 2.0)
    return session.compile(g).run(x=np.arange(3, dtype=np.float32))["y"]


def test_a_session_has_the_device_of_its_specification() -> None:
    with hg.connect("local:#cpu:threads=1,memory=64MiB") as session:
        (device,) = session.devices
        assert device.memory().total_bytes == 64 * 2**20 and device.features["threads"] == "1"
        assert session.address == "local:#cpu:threads=1,memory=64MiB"
        with hg.connect(session.address) as again:
            assert again.info.incarnation == session.info.incarnation
        with hg.connect("local:#cpu:threads=1,memory=32MiB") as other, hg.connect("local:") as plain:
            assert len({one.info.incarnation for one in (session, other, plain)}) == 3
            for one in (session, other, plain):
                assert double(one).tolist() == [0.0, 2.0, 4.0]


def test_the_default_specification_is_that_of_local_alone() -> None:
    with hg.connect("local:") as one, hg.connect("local:#cpu") as other, hg.connect("local:#cpu0") as third:
        assert one.info.incarnation == other.info.incarnation == third.info.incarnation


def test_devices_end_with_the_last_session_of_their_specification() -> None:
    before = set(threading.enumerate())
    url = "local:#cpu:threads=2,memory=1MiB"
    with hg.connect(url) as first:
        life = first.info.incarnation
        with hg.connect(url):
            pass
        assert first.devices[0].memory().total_bytes == 2**20
    assert set(threading.enumerate()) == before
    with hg.connect(url) as later:
        assert later.info.incarnation != life


def test_a_specification_that_is_wrong_leaves_nothing_behind() -> None:
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="the lid is open"):
            hg.connect("local:#fake:fail=the lid is open")


def test_one_that_starts_slowly_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin's constructor waits until another specification has a session."""
    monkeypatch.syspath_prepend(tmp_path)
    slow = write_plugin(tmp_path, "slowsim")
    text = slow.read_text().replace("self.made = []", "self.made = []; begun.set(); assert go_on.wait(20)")
    slow.write_text(
        text.replace(
            '"""A plugin."""', "import threading\nbegun, go_on = threading.Event(), threading.Event()"
        )
    )
    info = tmp_path / "slow-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[heliograph.backends]\nslowsim = slowsim:BACKEND\n")
    import slowsim  # type: ignore[import-not-found]

    opened: list[hg.Session] = []
    opening = threading.Thread(target=lambda: opened.append(hg.connect("local:#slowsim:rows=1")))
    opening.start()
    assert slowsim.begun.wait(20)
    with hg.connect("local:#fake:memory=1MiB") as other:
        assert other.devices[0].name == "fake0" and not opened
        slowsim.go_on.set()
        opening.join(20)
    assert opened[0].devices[0].name == "slowsim0"
    opened[0].close()


def test_an_asyncio_session_has_the_device_of_its_specification_too() -> None:
    async def scenario() -> list[str]:
        async with hg.aio.connect("local:#fake:memory=1MiB") as session:
            return [one.name for one in session.devices]

    assert asyncio.run(scenario()) == ["fake0"]
