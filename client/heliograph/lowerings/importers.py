"""Parts of `hg.llm`, `hg.onnx` and `hg.torch`: names on first use, and the session of a model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping

import heliograph as hg

#: The options of `session.compile`.
_OPTIONS = frozenset(hg.CompileOptions.__annotations__) | {
    "devices", "weights", "variables", "on_loss", "journal_bytes", "timeout",
}  # fmt: skip


def lazy_names(
    package: str, modules: Mapping[str, str], needs: tuple[str, ...] = (), advice: str = ""
) -> Callable[[str], object]:
    """Return a package's `__getattr__`, which imports a name on first use.

    `modules`: for each name its module. `needs`: packages that are installed apart; without one of
    them, a name raises ConfigurationError with this advice.
    """

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=None)
        try:
            module = importlib.import_module(f"{package}.{modules[name]}")
        except ModuleNotFoundError as error:
            if error.name not in needs:
                raise
            raise hg.ConfigurationError(
                f"the package {error.name!r} is not installed", advice=advice
            ) from None
        found: object = getattr(module, name)
        setattr(sys.modules[package], name, found)
        return found

    return find


def check_session(session: object, call: str) -> None:
    """Check that a session was given where one belongs. Raises InvalidArgumentError."""
    if isinstance(session, hg.Session):
        return
    if isinstance(session, str):
        use = call.replace("()", "(session)")
        raise hg.InvalidArgumentError(
            f"{call} takes a session, and the URL {session!r:.80} is given",
            advice=f"connect first: with hg.connect({session!r:.80}) as session: {use}",
        )
    advice = "hg.connect(url) returns a session"
    if isinstance(session, hg.aio.Session):
        advice = "its compile() takes the graph of model.graph()"
    raise hg.InvalidArgumentError(
        f"{call} takes a session, and {type(session).__name__} is given", advice=advice
    )


def check_options(given: Collection[str]) -> None:
    """Check names of options of `session.compile` before it is called, which may be at the first
    run. Raises InvalidArgumentError."""
    if unknown := sorted(set(given) - _OPTIONS):
        raise hg.InvalidArgumentError(
            f"there is no option {unknown[0]!r:.80}", advice=f"options: {', '.join(sorted(_OPTIONS))}"
        )
