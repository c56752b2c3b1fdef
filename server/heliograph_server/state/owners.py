"""The owners of sessions in images."""

from __future__ import annotations

from collections.abc import Collection

from heliograph_server.resources.principals import Principal, Right
from heliograph_server.session.session import Session
from heliograph_server.state.image import ImageOwner


def owner_of(
    session: Session,
    tenant: bytes,
    principal: Principal,
    features: Collection[str],
    version: int,
    snapshot_ms: int,
    lease_ms: int,
) -> ImageOwner:
    """Return the owner of a session, for its images."""
    return ImageOwner(
        client=session.client,
        tenant=tenant,
        name=principal.tenant,
        rights=tuple(sorted(principal.rights)),
        shown=principal.shown,
        key=principal.key,
        version=version,
        features=tuple(features),
        lease_ms=lease_ms,
        snapshot_ms=snapshot_ms,
    )


def principal_of(owner: ImageOwner) -> Principal:
    """Return the caller that opened a session. Its quota is that of its tenant now."""
    known = {one.value for one in Right}
    rights = frozenset(Right(one) for one in owner.rights if one in known)
    return Principal(tenant=owner.name, rights=rights, shown=owner.shown, key=owner.key)
