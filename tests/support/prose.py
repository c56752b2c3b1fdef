"""Worst patterns of prose in docstrings, comments, messages and pages: `tests/support/prose.py PATHS`."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: The longest line of prose.
COLUMNS = 100

#: Code is not a person, and a reader should meet the subject first.
_PERSONS = re.compile(
    r"\b(nobody|somebody|whoever|anybody|everybody|who ever|he|him|his)\b(?!['’]s law)", re.IGNORECASE
)
#: A clause as the subject of a sentence: "Who reads slowly ...", "What a server gives is ...".
_CLAUSE = re.compile(r"(?:^|[.:!]\s+)(Who|Whose|Whom|What|Whatever|Whichever|Nor)\b(?![^.!]*\?)")
#: How a docstring may not begin: with a question.
_QUESTION = re.compile(r"(Who|Whose|Whom|What|Whether|Why|How|Where|When|Which|That)\b(?![^.!]*\?)")
#: Code between backquotes, quotations and code blocks are no prose.
_CODE = re.compile(r"```.*?```|``[^`]*``|`[^`]*`|\"[^\"\n]*\"", re.DOTALL)


@dataclass(frozen=True)
class Fault:
    """A pattern at a line of a file."""

    path: Path
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}"


def faults(path: Path) -> Iterator[Fault]:
    """Those of a module, a .proto file or a page."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from _of_module(path, text)
    elif path.suffix == ".proto":
        comments = [(number, line.lstrip()[2:].strip()) for number, line in _lines(text, "//")]
        yield from _of_comments(path, comments)
    else:
        yield from _of_page(path, text)


def _of_module(path: Path, text: str) -> Iterator[Fault]:
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            constant = node.body[0].value  # type: ignore[attr-defined]
            docstrings.add(id(constant))
            yield from _of_docstring(path, constant)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for found in _PERSONS.finditer(node.value) if " " in node.value else ():
                yield Fault(path, node.lineno, f"a text says {found[0]!r}")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [(one.start[0], one.string.lstrip("#: ")) for one in tokens if one.type == tokenize.COMMENT]
    yield from _of_comments(path, comments)


def _of_docstring(path: Path, node: ast.Constant) -> Iterator[Fault]:
    text = str(node.value)
    if found := _QUESTION.match(text.lstrip()):
        yield Fault(path, node.lineno, f"a docstring begins with {found[1]!r}")
    yield from _of_prose(path, node.lineno, text)
    for number, line in enumerate(text.splitlines()):
        indent = node.col_offset + 3 if number == 0 else 0
        if len(line) + indent > COLUMNS and "http" not in line:
            yield Fault(path, node.lineno + number, f"{len(line) + indent} columns")


def _of_comments(path: Path, lines: list[tuple[int, str]]) -> Iterator[Fault]:
    """Comments in consecutive lines are one text."""
    block: list[str] = []
    begin = last = 0
    for number, line in [*lines, (0, "")]:
        if number != last + 1:
            yield from _of_prose(path, begin, "\n".join(block))
            block, begin = [], number
        block.append(line)
        last = number


def _of_prose(path: Path, line: int, text: str) -> Iterator[Fault]:
    # Line ends stay, so that a fault has its line.
    text = _CODE.sub(lambda found: re.sub(r"[^\n]", "x", found[0]), text)
    for pattern, why in ((_PERSONS, "says"), (_CLAUSE, "a sentence begins with")):
        for found in pattern.finditer(text):
            number = line + text.count("\n", 0, found.start(1))
            yield Fault(path, number, f"{why} {found[1]!r}")


def _of_page(path: Path, text: str) -> Iterator[Fault]:
    yield from _of_prose(path, 1, text)
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if len(line) > COLUMNS and not is_code and "|" not in line and "http" not in line:
            yield Fault(path, number, f"{len(line)} columns")


def _lines(text: str, prefix: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(prefix):
            yield number, line


def files_of(path: Path) -> Iterator[Path]:
    """Those with prose below a folder, but for generated ones; or the file itself."""
    if path.is_file():
        yield path
        return
    for found in sorted(path.rglob("*")):
        if found.suffix in {".py", ".proto", ".md"} and "_pb2" not in found.name:
            yield found


if __name__ == "__main__":
    seen = [fault for name in sys.argv[1:] for file in files_of(Path(name)) for fault in faults(file)]
    print(*seen, f"{len(seen)} faults", sep="\n")
