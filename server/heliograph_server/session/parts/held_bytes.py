"""Bytes of a session that are filled from outside its commands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from heliograph_backends.contract import Tensor
from heliograph_proto.errors import UnknownHandleError
from heliograph_proto.types import tensor_type
from heliograph_server.session.parts.inside import SessionInside


def hold_bytes(inside: SessionInside, handle: int, size_bytes: int) -> tuple[Tensor, Callable[[], None]]:
    """Hold a u8 tensor, so that its memory can be filled. Return it and its release. Lock held.

    Until it is released it is not freed. Raises UnknownHandleError, InvalidArgumentError, or the
    error of the command that creates it.
    """
    plans = inside.core.plans
    bound = plans.hold_weight(handle, tensor_type("u8", (size_bytes,)))
    storage = bound.tensors[0].storage
    if storage is None or storage.buffer is None:
        plans.release_leaves(bound)
        raise UnknownHandleError(f"tensor {handle} has no memory yet", advice="wait until it is made")

    def release() -> None:
        storage.version += 1
        inside.executor.event(partial(plans.release_leaves, bound))

    return bound.tensors[0].placed, release
