"""CUDA's errors as Heliograph errors. Pure.

Some errors destroy the GPU's context, and every later call fails with the same error. Such a device
is lost until the process restarts; other devices of the process continue.
"""

from __future__ import annotations

from heliograph_backends.cuda.driver.driver import DriverError
from heliograph_proto.errors import (
    ComputeFailedError,
    DeviceLostError,
    HeliographError,
    OutOfMemoryError,
    UnsupportedError,
)

OUT_OF_MEMORY = 2
#: Launches that the device refuses: too many resources, no image for it, and so on. It stays
#: usable.
REFUSED = {1, 9, 98, 200, 209, 218, 222, 701, 900, 901, 906, 907}
#: Errors after which the context is gone, with descriptions.
STICKY = {
    46: "the device is busy or unavailable",
    100: "there is no device any longer",
    101: "the device no longer exists",
    201: "the context is gone",
    214: "memory has an error that cannot be corrected",
    220: "a link to another GPU failed",
    226: "it contained a failure of its memory or of a link",
    700: "a kernel read or wrote an illegal address",
    702: "a kernel exceeded the system's time limit",
    708: "the context was destroyed",
    709: "the context is destroyed",
    710: "an assertion of a kernel failed",
    714: "a kernel's stack is damaged",
    715: "a kernel executed an illegal instruction",
    716: "a kernel used a misaligned address",
    717: "a kernel used an address of the wrong kind",
    718: "a kernel jumped to an illegal address",
    719: "a kernel failed",
    721: "a kernel leaked tensor memory",
    999: "the driver failed for an unknown reason",
}


def is_sticky(error: DriverError) -> bool:
    """True if the error means that the device is lost."""
    return error.status in STICKY


def typed(error: DriverError, device_name: str) -> HeliographError:
    """Return the Heliograph error for one of CUDA's."""
    if error.status == OUT_OF_MEMORY:
        return OutOfMemoryError(
            f"device {device_name} does not have enough memory: {error}",
            advice="free tensors or plans, or use smaller ones",
        )
    if is_sticky(error):
        return lost(f"{STICKY[error.status]} ({error})", device_name)
    if error.status == 801:
        return UnsupportedError(f"device {device_name} does not support the operation: {error}")
    if error.status in REFUSED:
        return ComputeFailedError(f"device {device_name} refused a launch: {error}")
    return ComputeFailedError(f"device {device_name} failed: {error}")


def lost(reason: str, device_name: str) -> DeviceLostError:
    """Return the error of all work on a lost device."""
    return DeviceLostError(
        f"device {device_name} is lost: {reason}",
        advice="compile the plan for another device; this one returns when the daemon restarts",
    )
