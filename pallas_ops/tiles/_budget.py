"""How long a resolver may look for a tile, and at how many."""

from typing import Any


def check_budget(owner: str, budget_seconds: Any, most_candidates: Any) -> None:
    """Raises `TypeError` or `ValueError` for a budget that is none, naming who was given it."""
    if isinstance(budget_seconds, bool) or not isinstance(budget_seconds, int | float):
        raise TypeError(f"{owner}: `budget_seconds` must be a number, got {budget_seconds!r}.")
    if isinstance(most_candidates, bool) or not isinstance(most_candidates, int):
        raise TypeError(f"{owner}: `most_candidates` must be an int, got {most_candidates!r}.")
    if not (budget_seconds > 0 and most_candidates > 0):
        raise ValueError(
            f"{owner}: `budget_seconds` and `most_candidates` must be positive, got "
            f"{budget_seconds!r} and {most_candidates!r}."
        )
