"""Files that are read again when they change: what is good counts, what is bad leaves the old in force."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from heliograph_proto.errors import ConfigurationError
from heliograph_server.daemon.reload import MOST_BYTES, FileWatch, ReloadedFile


def number(content: bytes) -> int:
    if not content.strip().isdigit():
        raise ConfigurationError(f"{content!r} is no number")
    return int(content)


class Watched:
    """A file with a number in it, and what was said of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changes: list[int] = []
        self.problems: list[str] = []
        self.file = ReloadedFile(number, path, on_change=self.changes.append, on_problem=self.problems.append)

    def looks(self, times: int = 2) -> int:
        """What is in force after some looks; two are enough for what has settled."""
        for _ in range(times):
            self.file.look()
        return self.file.value


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    path = tmp_path / "number"
    path.write_text("1")
    return Watched(path)


def test_a_changed_file_is_in_force_after_two_looks_that_found_the_same(watched: Watched) -> None:
    watched.path.write_text("2")
    assert watched.looks(1) == 1
    assert watched.looks(1) == 2
    assert (watched.changes, watched.problems) == ([2], [])


def test_a_file_that_is_still_being_written_is_left_alone(watched: Watched) -> None:
    for text in ("2", "23", "234"):
        watched.path.write_text(text)
        assert watched.looks(1) == 1
    assert watched.looks(1) == 234
    assert watched.changes == [234]


def test_what_somebody_asks_for_counts_at_once(watched: Watched) -> None:
    watched.path.write_text("2")
    assert watched.file.look(at_once=True)
    assert watched.file.value == 2


def test_nothing_is_said_of_a_file_that_does_not_change(watched: Watched) -> None:
    os.utime(watched.path, (1, 1))
    assert watched.looks(5) == 1
    assert not watched.file.look(at_once=True)
    assert (watched.changes, watched.problems) == ([], [])


def test_a_content_that_changes_under_the_same_size_and_time_is_noticed(watched: Watched) -> None:
    before = watched.path.stat()
    watched.path.write_text("7")
    os.utime(watched.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert watched.looks() == 7


def test_a_bad_content_leaves_the_old_one_in_force_and_is_complained_of_once(watched: Watched) -> None:
    watched.path.write_text("many")
    assert watched.looks(5) == 1
    assert watched.problems == ["b'many' is no number"] and watched.file.problem
    watched.path.write_text("3")
    assert watched.looks() == 3
    assert not watched.file.problem


def test_somebody_who_asks_is_told_again_what_is_still_wrong(watched: Watched) -> None:
    watched.path.write_text("many")
    watched.looks()
    watched.file.look(at_once=True)
    assert len(watched.problems) == 2


def test_a_bad_content_that_is_taken_back_is_no_change(watched: Watched) -> None:
    watched.path.write_text("many")
    watched.looks()
    watched.path.write_text("1")
    assert watched.looks() == 1
    assert watched.changes == [] and not watched.file.problem


def test_a_file_that_is_renamed_over_is_read(watched: Watched) -> None:
    other = watched.path.with_name("other")
    other.write_text("4")
    other.replace(watched.path)
    assert watched.looks() == 4


def test_a_file_that_is_missing_for_a_moment_is_no_problem(watched: Watched) -> None:
    watched.path.unlink()
    assert watched.looks(1) == 1
    watched.path.write_text("5")
    assert watched.looks() == 5
    assert watched.problems == []


def test_a_file_that_stays_away_is_a_problem_until_it_is_back(watched: Watched) -> None:
    watched.path.unlink()
    assert watched.looks(4) == 1
    (problem,) = watched.problems
    assert "cannot read" in problem
    watched.path.write_text("1")
    assert watched.looks() == 1 and not watched.file.problem


def test_a_link_to_a_folder_that_is_turned_to_another_one_is_followed(tmp_path: Path) -> None:
    """As Kubernetes does with secrets: FILE -> ..data/FILE, and ..data is a link that it renames over."""
    for name, text in (("..1", "1"), ("..2", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "number").write_text(text)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "number").symlink_to("..data/number")
    watched = Watched(tmp_path / "number")
    (tmp_path / "..tmp").symlink_to("..2")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    (tmp_path / "..1" / "number").unlink()
    assert watched.looks() == 2


def test_files_that_belong_together_are_judged_together(tmp_path: Path) -> None:
    left, right = tmp_path / "left", tmp_path / "right"

    def pair(one: bytes, other: bytes) -> bytes:
        if one != other:
            raise ValueError("they do not match")
        return one

    left.write_text("a")
    right.write_text("a")
    problems: list[str] = []
    file = ReloadedFile(pair, left, right, on_problem=problems.append)
    left.write_text("b")
    file.look()
    right.write_text("b")
    assert not file.look() and file.look() and file.value == b"b"
    assert problems == []
    right.write_text("c")
    assert not file.look(at_once=True) and file.value == b"b"
    assert problems == ["ValueError: they do not match"]


def test_a_change_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    def refuse(_: int) -> None:
        raise ConfigurationError("not that one")

    path = tmp_path / "number"
    path.write_text("1")
    file = ReloadedFile(number, path, on_change=refuse)
    path.write_text("2")
    assert not file.look(at_once=True)
    assert file.value == 1 and file.problem == "not that one"


def test_what_is_bad_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        ReloadedFile(number, tmp_path / "none")
    (tmp_path / "number").write_text("many")
    with pytest.raises(ConfigurationError, match="no number"):
        ReloadedFile(number, tmp_path / "number")


def test_what_is_no_file_or_too_long_for_one_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b"1" * (MOST_BYTES + 1))
    for name, said in (("pipe", "not a regular file"), ("long", "longer"), (".", "directory")):
        with pytest.raises(ConfigurationError, match=said):
            ReloadedFile(number, tmp_path / name)


def test_a_watch_looks_at_all_of_its_files_and_complains_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = tmp_path / "good", tmp_path / "bad"
    watch = FileWatch()
    files = []
    for path in paths:
        path.write_text("1")
        files.append(ReloadedFile(number, path))
        watch.add("configuration", files[-1])
    paths[0].write_text("2")
    paths[1].write_text("many")
    with caplog.at_level(logging.ERROR):
        watch.look(at_once=True)
    assert [file.value for file in files] == [2, 1]
    assert watch.outcomes()["configuration", "ok"] == watch.outcomes()["configuration", "failed"] == 1
    assert watch.failing() == {"configuration": True, "tokens": False, "certificates": False}
    assert str(paths[1]) in caplog.text and "stays in use" in caplog.text
