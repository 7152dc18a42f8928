"""What may watch a program while it runs: each watch is installed before, and holds its findings after."""

import contextlib


class Watch:
    """A watch that sees nothing, for others to begin with. Its findings are attributes, dictionaries by rank.

    `places`: the kinds of ranks (see lab/ranks.py) on which it makes sense. `apart`: the names of watches that can't be
    installed together with it, and why.
    """

    places: tuple[str, ...] = ("threads", "alone", "processes")
    apart: dict[str, str] = {}

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def around(self, ranks) -> contextlib.AbstractContextManager:
        """Installed while all ranks of this process run."""
        return contextlib.nullcontext()

    def begin(self, modules, rank: int) -> None:
        """On each rank, before its train.py is imported."""

    def end(self, modules, rank: int) -> None:
        """On each rank, after its main()."""

    def found(self, rank: int) -> dict[str, object]:
        """The findings about this rank, by the attribute's name; a process sends them where they are asked for."""
        return {name: value[rank] for name, value in vars(self).items()
                if isinstance(value, dict) and rank in value and not name.startswith("_")}
