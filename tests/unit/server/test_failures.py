"""Exceptions of backends become typed errors and lines of the log."""

from __future__ import annotations

import logging

import pytest

from heliograph_proto.errors import ComputeFailedError, InternalError, OutOfMemoryError
from heliograph_server.resources.failures import typed


@pytest.mark.parametrize(
    "error, computing, expected",
    [
        (ValueError("bad"), False, InternalError),
        (ValueError("bad"), True, ComputeFailedError),
        (MemoryError(), True, OutOfMemoryError),
    ],
)
def test_an_unexpected_exception_becomes_a_typed_error(
    error: Exception, computing: bool, expected: type[Exception]
) -> None:
    assert type(typed(error, "reading", computing=computing)) is expected


def test_a_typed_error_stays_as_it_is() -> None:
    error = ComputeFailedError("it burst")
    assert typed(error, "reading") is error


def test_the_log_keeps_the_text_of_a_failure_and_not_the_exception(caplog: pytest.LogCaptureFixture) -> None:
    # A record is kept by whoever collects them, and an exception keeps every frame that it passed.
    with caplog.at_level(logging.INFO):
        typed(ValueError("bad"), "reading")
    (record,) = caplog.records
    assert record.getMessage() == "reading failed: ValueError: bad"
    assert record.exc_info is None
    assert not any(isinstance(one, BaseException) for one in record.args or ())
