"""What `make test-gpu` and `make bench-gpu` say of a Python that cannot run them."""

from __future__ import annotations

from importlib import metadata

import checkout
import pytest


def test_this_environment_has_what_the_packages_need() -> None:
    assert checkout.why_not() == ""


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("numpy>=999.1", f"numpy is {metadata.version('numpy')} and not 999.1 or newer"),
        ("heliograph-nowhere>=2,<3", "heliograph-nowhere>=2 is missing"),
        ("heliograph-nowhere[extra]", "heliograph-nowhere>=0 is missing"),
    ],
)
def test_what_is_missing_or_too_old_is_named_with_what_to_do(requirement: str, expected: str) -> None:
    found = checkout.lacking(["numpy>=1", requirement])
    assert found.startswith(f"{expected}: ") and "PYTHONPATH" in found


def test_what_only_some_systems_need_is_not_asked_for() -> None:
    assert checkout.lacking(["heliograph-nowhere>=2; sys_platform == 'win32'"]) == ""
