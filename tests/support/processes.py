"""The processes of a run, wherever torchrun has put them: found by a variable of their environment."""

import pathlib


def processes(marker: str) -> dict[int, int | None]:
    """pid -> rank (None for torchrun itself) of all that run with MARKER=marker in their environment."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if f"MARKER={marker}" in variables:
            ranks = [int(text.removeprefix("RANK=")) for text in variables if text.startswith("RANK=")]
            found[int(path.parent.name)] = ranks[0] if ranks else None
    return found
