"""The most of one tenant by default, so that others always find room."""

from __future__ import annotations

import pytest
from tenant_hosts import TenantHost

from heliograph_backends.fake import FakeDevice
from heliograph_proto import commands as c
from heliograph_proto.errors import LimitExceededError
from heliograph_proto.sessions import Quota
from heliograph_proto.types import tensor_type
from heliograph_server.config.config import ServerConfig
from heliograph_server.daemon.daemon import total_of


def host_with(total: Quota) -> TenantHost:
    return TenantHost(FakeDevice(memory_bytes=2**20), total=total, a=ServerConfig().quota)


def test_a_tenant_has_64_sessions_unless_the_operator_says_otherwise() -> None:
    with host_with(Quota(sessions=0)) as host:
        for _ in range(64):
            host.client("a")
        with pytest.raises(LimitExceededError) as refused:
            host.client("a")
        assert "64 sessions" in refused.value.message and "close a session" in refused.value.advice
        assert refused.value.retry_after_seconds
        host.client("b")


def test_all_tenants_together_have_as_many_sessions_as_the_server_allows() -> None:
    with host_with(Quota(sessions=3)) as host:
        for tenant in "aab":
            host.client(tenant)
        for tenant in "ab":
            with pytest.raises(LimitExceededError) as refused:
                host.client(tenant)
            assert "the quota of this server is 3 sessions" in refused.value.message
        assert host.usage("a").sessions == 2 and host.usage("a").refused == 1
        host.clients.pop(0).session.close()
        host.client("b")


def test_a_tenant_stages_half_of_what_all_may_stage() -> None:
    with host_with(Quota(staging_bytes=1000)) as host:
        first, second = host.client("a"), host.client("a")
        first.session.begin_upload(1, 400)
        with pytest.raises(LimitExceededError) as refused:
            second.session.begin_upload(1, 200)
        assert "500 bytes of transfers" in refused.value.message
        host.client("b").session.begin_upload(1, 500)
        first.session.close()
        second.session.begin_upload(2, 200)


def test_data_in_commands_and_results_counts_as_staged() -> None:
    with host_with(Quota(staging_bytes=1000)) as host:
        client = host.client("a")
        client.do(c.Allocate(1, tensor_type("f32", (128,))))
        refused = client.refused(c.GetTensor(1, 0, 512))
        assert isinstance(refused, LimitExceededError) and "500 bytes" in refused.message
        client.do(c.GetTensor(1, 0, 400))
        assert host.usage("a").staging_bytes == 0


def test_a_session_of_any_machine_may_stage_what_its_limits_promise() -> None:
    config = ServerConfig()
    assert total_of(config).staging_bytes >= 2 * config.limits.in_flight_bytes
    assert total_of(ServerConfig(staging_size=5)).staging_bytes == 5
