"""A process that draws one picture of a plan.

A picture of many nodes takes a second of a processor and more. In the daemon's own process, every
run would wait for it again and again.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

from heliograph_proto.errors import CancelledError, InternalError, LimitExceededError
from heliograph_server.web.explaining.picture_program import TOO_LARGE

logger = logging.getLogger(__name__)

#: The most time of a picture: of a processor, and on a clock.
CPU_SECONDS, SECONDS = 20, 40.0
#: The most memory of its process, and the most bytes of its page.
MEMORY_BYTES, PAGE_BYTES = 2 * 2**30, 24 * 2**20
ADVICE = "plan.explain().html(path) draws it in the program that made the plan"

_PROGRAM = "from heliograph_server.web.explaining import picture_program as it; it.main()"


class PictureProcess:
    """Draws one picture. `draw` is called on a thread, and `end` from anywhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False

    def draw(self, request: bytes) -> bytes:
        """Return the page for a request of `picture_program`.

        Raises LimitExceededError if it takes too long or is too large, CancelledError after `end`,
        and InternalError.
        """
        process = self._started()
        try:
            page, errors = process.communicate(request, SECONDS)
        except subprocess.TimeoutExpired:
            raise LimitExceededError(f"the picture takes over {SECONDS:g} s", advice=ADVICE) from None
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        if process.returncode != 0:
            raise self._failure(process.returncode, errors)
        return page

    def end(self) -> None:
        """Kill the process, which must not begin either. Idempotent."""
        with self._lock:
            self._has_ended = True
            if self._process is not None:
                self._process.kill()

    def _started(self) -> subprocess.Popen[bytes]:
        """Start the program with this process's import path."""
        # Nothing is imported from the current folder, which may be another user's.
        command = [sys.executable, "-P", "-c", _PROGRAM]
        command += map(str, (CPU_SECONDS, MEMORY_BYTES, PAGE_BYTES))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # It computes nothing with NumPy, whose threads would only take memory.
            "OPENBLAS_NUM_THREADS": "1",
        }
        with self._lock:
            if self._has_ended:
                raise CancelledError("the picture is not wanted any more")
            try:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    # Ctrl-C drains a daemon, whose pages may still be open.
                    start_new_session=True,
                )
            except OSError as error:
                raise InternalError(
                    f"the process that draws did not start: {error.strerror}", advice=ADVICE
                ) from None
            return self._process

    def _failure(self, status: int, errors: bytes) -> Exception:
        """The error of a process that ended with a status."""
        if self._has_ended:
            return CancelledError("the picture is not wanted any more")
        if status == TOO_LARGE:
            return LimitExceededError(f"the picture has more than {PAGE_BYTES // 2**20} MiB", advice=ADVICE)
        last = errors.decode(errors="replace").rstrip().rpartition("\n")[2][:500]
        # Protobuf has words of its own for memory that it does not get.
        if status < 0 or last.startswith("MemoryError") or last.endswith("Arena alloc failed"):
            return LimitExceededError(
                f"the picture takes over {CPU_SECONDS} s of a processor, or too much memory", advice=ADVICE
            )
        logger.error("the process that draws a plan ended with status %d: %s", status, last)
        return InternalError("the plan cannot be drawn; the daemon's log says why", advice=ADVICE)
