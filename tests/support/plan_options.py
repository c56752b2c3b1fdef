"""Options of plans as tests write them: mappings by node, weight and device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from heliograph_proto.plans import PlanOptions
from heliograph_proto.v1 import plan_pb2


def plan_options(
    *,
    pins: Mapping[int, str] | None = None,
    memory: Mapping[str, int] | None = None,
    splits: Mapping[int, Any] | None = None,
    buffer_types: Mapping[str, str] | None = None,
    devices: Any = (),
    taps: Any = (),
    **options: Any,
) -> PlanOptions:
    """`pins`: names of devices by node; `splits`: how the rows of weights lie, by leaf."""
    return PlanOptions(
        devices=tuple(devices),
        pins=_grouped(pins or {}),
        memory=tuple((memory or {}).items()),
        splits=_grouped(splits or {}),
        buffer_types=tuple((buffer_types or {}).items()),
        taps=tuple(taps),
        **options,
    )


def divided(wish: Mapping[str, Any]) -> tuple[PlanOptions, dict[str, Any]]:
    """Those of a wish that are options of a plan, and the rest."""
    names = {one.name for one in fields(PlanOptions)}
    rest = {name: value for name, value in wish.items() if name not in names}
    return plan_options(**{name: value for name, value in wish.items() if name in names}), rest


def divided_fields(wish: Mapping[str, Any]) -> dict[str, Any]:
    """As `divided`, of a message: fields of a request, with its options."""
    names = set(plan_pb2.PlanOptions.DESCRIPTOR.fields_by_name)
    options = plan_pb2.PlanOptions(**{name: value for name, value in wish.items() if name in names})
    return {**{name: value for name, value in wish.items() if name not in names}, "options": options}


def _grouped(by_number: Mapping[int, Any]) -> tuple[tuple[Any, tuple[int, ...]], ...]:
    found: dict[Any, list[int]] = {}
    for number, value in by_number.items():
        found.setdefault(value, []).append(number)
    return tuple((value, tuple(numbers)) for value, numbers in found.items())
