"""What is refused while its bytes are on their way leaves none of them behind."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from daemon_threads import ThreadDaemon

import heliograph as hg
from heliograph_backends.cpu.backend import CpuDevice
from heliograph_proto.codec.bulk import UploadPiece

#: Of a tensor, more than one message has, and more than the device.
LARGE = 4 * 2**20
#: So many messages may be on their way when it is looked.
FEW = 4


def pieces() -> int:
    gc.collect()
    return sum(type(one) is UploadPiece for one in gc.get_objects())


def test_uploads_to_a_device_that_is_full_leave_nothing_in_the_servers_memory() -> None:
    daemon = ThreadDaemon(CpuDevice(threads=1, native=False, memory_bytes=2**20))
    try:
        with hg.connect(daemon.url, shared_memory=False) as session:
            array = np.ones(LARGE // 4, np.float32)
            # Handles of what was refused are kept, as errors that somebody may ask for.
            kept = [session.put(array) for _ in range(20)]
            for one in kept:
                with pytest.raises(hg.OutOfMemoryError):
                    one.get()
            assert pieces() <= FEW
    finally:
        daemon.stop()
