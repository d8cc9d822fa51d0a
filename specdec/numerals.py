"""Numbers as reports show them; what there is none of is a dash."""

from __future__ import annotations

NONE = "-"


def one(value: float | None) -> str:
    """With one decimal place."""
    return NONE if value is None else f"{value:.1f}"


def two(value: float | None) -> str:
    """With two decimal places."""
    return NONE if value is None else f"{value:.2f}"


def three(value: float | None) -> str:
    """With three decimal places; sums of probabilities, which round to a little below nothing, are not below it."""
    return NONE if value is None else f"{abs(value) if abs(value) < 5e-4 else value:.3f}"


def times(value: float | None) -> str:
    """How many times as fast."""
    return NONE if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """A share, in whole percent."""
    return NONE if value is None else f"{100 * value:.0f} %"
