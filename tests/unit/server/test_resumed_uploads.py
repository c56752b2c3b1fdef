"""Uploads that go on after their connection broke: one connection at a time adds bytes."""

from __future__ import annotations

import pytest

from heliograph_proto.errors import CancelledError, UnavailableError
from heliograph_server.session.bulk import ResumableUploads, TransferUpload
from heliograph_server.session.staging import StagedUpload, Staging

SIZE_BYTES = 100


class Overtaken(TransferUpload):
    """An upload with which another connection goes on just before this one does."""

    uploads: ResumableUploads
    is_asked = False
    others: list[TransferUpload | None | int]

    def successor(self) -> TransferUpload:
        if not self.others:
            self.others.append(None)
            other = self.uploads
            self.others[0] = other.received(1, 1) if self.is_asked else other.go_on(1, SIZE_BYTES, 0, 0)
        return super().successor()


def overtaken() -> Overtaken:
    uploads = ResumableUploads()
    staged = StagedUpload(SIZE_BYTES, Staging(10 * SIZE_BYTES))
    made = Overtaken(staged, lambda: None, lambda _: None, uploads.over, is_kept=True)
    made.uploads, made.others = uploads, []
    uploads.add(1, made)
    made.break_off(UnavailableError("the connection broke"))
    return made


def test_of_two_connections_that_go_on_with_an_upload_one_adds_its_bytes() -> None:
    upload = overtaken()
    with pytest.raises(CancelledError, match="another upload goes on"):
        upload.uploads.go_on(1, SIZE_BYTES, 0, 0)
    (winner,) = upload.others
    assert isinstance(winner, TransferUpload)
    winner.write(0, memoryview(bytes(SIZE_BYTES)))


def test_a_connection_does_not_go_on_once_a_later_one_has_asked_for_the_place() -> None:
    upload = overtaken()
    upload.is_asked = True
    with pytest.raises(CancelledError, match="another upload goes on"):
        upload.uploads.go_on(1, SIZE_BYTES, 0, 0)
    assert upload.others == [0]
    later = upload.uploads.go_on(1, SIZE_BYTES, 0, 1)
    assert later is not None
    later.write(0, memoryview(bytes(SIZE_BYTES)))
