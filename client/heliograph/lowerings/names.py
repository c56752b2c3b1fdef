"""Names of a graph for those of a model."""

from __future__ import annotations


class Names:
    """Names that a graph can have, for a model's own, which may be of any characters."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def free(self, wanted: str) -> str:
        """Return a name that is like the wanted one, valid and not taken."""
        plain = wanted[:500] if wanted and wanted.isprintable() else "tensor"
        name, count = plain, 1
        while name in self._taken:
            count += 1
            name = f"{plain}.{count}"
        self._taken.add(name)
        return name
