"""The right that each method needs. What is not in here nobody may call."""

from __future__ import annotations

from heliograph_server.core.principals import Right

#: Answers anybody, as orchestrators and load balancers ask without knowing a secret.
OPEN_PREFIX = "/grpc.health.v1.Health/"
_REFLECTION = "ServerReflection/ServerReflectionInfo"

_NEEDED: dict[Right, dict[str, tuple[str, ...]]] = {
    Right.USE: {
        "SessionService": ("Open", "Close", "GetStatistics", "FollowLog"),
        "DeviceService": (
            "ListDevices",
            "GetMemory",
            "QueryOps",
            "QueryPlacement",
            "ListWays",
        ),
        "PlanService": ("Compile", "Estimate", "PlaceContents", "Explain", "Reserve"),
        "BulkService": (
            "Upload",
            "UploadShared",
            "Download",
            "FindMissingContents",
            "Admit",
            "UploadAdmitted",
        ),
        "CommandService": ("Execute",),
        "ModelService": ("ListModels", "DescribeModel"),
    },
    # Values go under capabilities that are good once. That alone would do for their bytes; but whoever may
    # call has this daemon hold, send and measure things, so that it must be of the pool.
    Right.POOL: {"PeerService": ("Exchange", "Pull", "Push", "Echo", "Probe")},
    Right.ADMIN: {
        "AdminService": ("ListSessions", "EndSession", "Drain", "UndoDrain", "SetLogLevel", "Watch"),
    },
}

#: By the method's path, as gRPC writes it.
NEEDED: dict[str, Right] = {
    f"/heliograph.v1.{service}/{method}": right
    for right, services in _NEEDED.items()
    for service, methods in services.items()
    for method in methods
} | {f"/grpc.reflection.{version}.{_REFLECTION}": Right.USE for version in ("v1alpha", "v1")}


def right_for(method: str) -> Right | None:
    """The right that a method needs; None for one that is in no table."""
    return NEEDED.get(method)
