"""Tensors from member to member: the one that is to have it fetches it, and nothing passes through here."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import heliograph as hg
from heliograph.head.handoff import hand_over
from heliograph_proto.errors import HeliographError, MemberLostError, PermissionDeniedError, UnavailableError
from heliograph_server.pool.remote.answers import printable

if TYPE_CHECKING:
    from heliograph_server.pool.remote.device import RemoteDevice

logger = logging.getLogger(__name__)


def hand(source: hg.Tensor, giver: RemoteDevice, destination: hg.Tensor, taker: RemoteDevice) -> bool:
    """Copies a tensor of one member to one of another, if that can reach it; whether it could.

    Raises MemberLostError for either, and the error of what was to compute the tensor.
    """
    whence, there = giver.member.site, taker.member.site
    if whence.why_not or there.why_not or not there.can_reach(whence):
        return False
    devices = giver.member_name, taker.member_name
    try:
        hand_over(source, destination, whence.address, devices)
    except HeliographError as error:
        for device in (giver, taker):
            if device.member.session.closed:
                raise device.member.ours(error) from None
        if isinstance(error, MemberLostError | UnavailableError | PermissionDeniedError):
            # Both are there, as far as this host sees.
            logger.warning(
                "%s fetches nothing from %s: %s", there.name, whence.name, printable(error.message)
            )
            there.cannot_reach(whence)
            return False
        raise error.at(replace(error.origin, sequence=0)) from None
    return True
