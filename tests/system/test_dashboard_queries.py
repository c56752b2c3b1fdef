"""Every query of the dashboard and the rules, evaluated by a real Prometheus that scrapes daemons at work."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator

import pytest
from paths import DEPLOY
from prometheus_site import RULES, SECONDS, Site, filled, working_site

pytestmark = pytest.mark.slow

DASHBOARD = DEPLOY / "grafana" / "heliograph.json"
README = DEPLOY / "prometheus" / "README.md"
#: Panels without data here, and the reason, which the page of metrics tells too.
EMPTY = {"Certificate expires in": "TLS"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A Prometheus that scrapes a member and the head of its pool, both at work."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    with working_site(tmp_path_factory.mktemp("prometheus")) as found:
        yield found


def panels() -> Iterator[tuple[str, list[str]]]:
    """The titles and queries of the dashboard."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if queries := [target["expr"] for target in panel.get("targets", ())]:
            yield panel["title"], queries


PANELS = list(panels())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("title", "queries"), PANELS, ids=[title for title, _ in PANELS])
def test_a_panel_has_data_of_daemons_at_work_or_is_empty_by_design(
    title: str, queries: list[str], site: Site
) -> None:
    if title in EMPTY:
        assert not any(site.numbers(filled(query)) for query in queries)
        assert title in README.read_text() and EMPTY[title] in README.read_text()
        return
    for query in queries:
        assert site.numbers_in_time(filled(query))


@pytest.mark.timeout(300)
def test_a_panel_over_time_has_a_series_for_each_daemon(site: Site) -> None:
    now, query = time.time(), filled('heliograph_runs_queued{instance=~"$instance"}')
    found = site.ask("query_range", query=query, start=str(now - 5), end=str(now), step="1")["result"]
    assert len({one["metric"]["instance"] for one in found}) == 2


@pytest.mark.timeout(300)
def test_the_variable_of_the_dashboard_lists_the_daemons(site: Site) -> None:
    names = site.ask("label/instance/values", **{"match[]": "heliograph_build_info"})
    assert len(names) == 2


@pytest.mark.timeout(300)
def test_every_rule_is_evaluated_without_an_error_and_none_fires_for_healthy_daemons(site: Site) -> None:
    end = time.monotonic() + SECONDS
    while True:
        rules = [rule for group in site.ask("rules")["groups"] for rule in group["rules"]]
        if rules and all(rule["health"] == "ok" for rule in rules):
            break
        assert time.monotonic() < end, rules
        time.sleep(0.5)
    assert len(rules) == RULES.read_text().count("- alert:")
    firing = [rule["name"] for rule in rules if rule["state"] == "firing"]
    assert not firing
