"""The metrics of a daemon as a test reads them."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def figures(port: int) -> dict[str, float]:
    """The samples, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
