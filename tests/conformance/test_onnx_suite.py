"""A sample of `onnx.backend.test`; `make test-onnx` runs all of it."""

from __future__ import annotations

import pytest
from daemon_urls import DaemonUrls
from onnx_suite import outcomes, table

#: Every so many cases of the suite of nodes are run.
EVERY = 12


@pytest.mark.parametrize(
    ("kind", "every"), [("node", EVERY), ("pytorch-converted", 4), ("pytorch-operator", 4)]
)
def test_no_case_of_the_suite_is_wrong(kind: str, every: int) -> None:
    """Each passes, or is refused by name."""
    found = list(outcomes(kind, every=every))
    assert not [one for one in found if one.kind == "wrong"], table(found)
    share = sum(one.passed for one in found) / len(found)
    assert share > 0.9, table(found)


@pytest.mark.parametrize("name", ["densenet121", "shufflenet"])
def test_whole_networks_give_the_stored_results(name: str) -> None:
    (found,) = outcomes("light", name)
    assert found.kind == "device", found.detail


def test_cases_have_the_same_results_from_a_daemon(daemon: DaemonUrls) -> None:
    found = list(outcomes("node", every=5 * EVERY, url=daemon.tcp))
    here = list(outcomes("node", every=5 * EVERY))
    assert [(one.name, one.kind) for one in found] == [(one.name, one.kind) for one in here]
