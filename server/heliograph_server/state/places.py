"""The devices that images of sessions need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from heliograph_proto.errors import SnapshotFailedError
from heliograph_proto.sessions import Limits
from heliograph_server.state.image import Image
from heliograph_server.state.requests import decode_compile
from heliograph_server.state.store import StateStore


def devices_of(images: Iterable[Image], store: StateStore) -> frozenset[str]:
    """Return the names of the devices on which the images have memory, streams and plans."""
    return frozenset(name for image in images for name in _names(image, store) if name)


def _names(image: Image, store: StateStore) -> Iterator[str]:
    yield from (one.device for one in image.storages if one.error is None)
    yield from (one.device for one in image.streams if one.error is None)
    for plan in image.plans:
        if plan.error is None and plan.request:
            try:
                yield from decode_compile(store.whole(plan.request), Limits()).options.devices
            except SnapshotFailedError:
                continue  # restoring the plan reports it
