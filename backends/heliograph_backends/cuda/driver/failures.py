"""CUDA's errors as ours. Pure.

After some of them the GPU's context is gone: every later call fails with the same. Such a device is lost
until the process starts anew; other devices of the process go on.
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
#: Launches that the device refuses: too many resources, no image for it, and the like. It lives on.
REFUSED = {1, 9, 98, 200, 209, 218, 222, 701, 900, 901, 906, 907}
#: After which the context is gone, in words.
STICKY = {
    46: "the device is busy or unavailable",
    100: "there is no device any more",
    101: "there is no such device any more",
    201: "the context is gone",
    214: "memory has an error that cannot be corrected",
    220: "a link to another GPU failed",
    226: "it contained a failure of its memory or of a link",
    700: "a kernel read or wrote an illegal address",
    702: "a kernel ran longer than the system lets it",
    708: "the context was destroyed",
    709: "the context is destroyed",
    710: "an assertion of a kernel failed",
    714: "a kernel's stack is damaged",
    715: "a kernel met an illegal instruction",
    716: "a kernel met a misaligned address",
    717: "a kernel met an address of the wrong kind",
    718: "a kernel jumped to an illegal address",
    719: "a kernel failed",
    721: "a kernel left tensor memory behind",
    999: "the driver failed for reasons that it does not tell",
}


def is_sticky(error: DriverError) -> bool:
    """Whether the device is lost."""
    return error.status in STICKY


def typed(error: DriverError, device_name: str) -> HeliographError:
    """Ours for one of CUDA's, in words that say what to do."""
    if error.status == OUT_OF_MEMORY:
        return OutOfMemoryError(
            f"device {device_name} has not enough memory: {error}",
            advice="free tensors or plans, or use smaller ones",
        )
    if is_sticky(error):
        return lost(f"{STICKY[error.status]} ({error})", device_name)
    if error.status == 801:
        return UnsupportedError(f"device {device_name} cannot do that: {error}")
    if error.status in REFUSED:
        return ComputeFailedError(f"device {device_name} refused a launch: {error}")
    return ComputeFailedError(f"device {device_name} failed: {error}")


def lost(why: str, device_name: str) -> DeviceLostError:
    """What everything on a lost device ends with."""
    return DeviceLostError(
        f"device {device_name} is lost: {why}",
        advice="compile the plan for another device; this one comes back when the daemon starts anew",
    )
