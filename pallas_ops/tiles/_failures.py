"""Failures of many tiles in few words."""

from collections.abc import Mapping

from ._config import TileConfig


def failures_told(failures: Mapping[TileConfig, str]) -> str:
    """Each reason once, with a tile that it was given for: many tiles often fail alike."""
    by_reason: dict[str, list[TileConfig]] = {}
    for tile, reason in failures.items():
        by_reason.setdefault(reason, []).append(tile)
    lines = [
        f"\n  - {tiles[0]}" + (f" and {len(tiles) - 1} more" if tiles[1:] else "") + f": {reason}"
        for reason, tiles in by_reason.items()
    ]
    more = [f"\n  - and {len(lines) - 5} other reasons"] if len(lines) > 5 else []
    return "".join(lines[:5] + more)
