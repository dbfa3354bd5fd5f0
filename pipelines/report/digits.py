"""Numbers as readers want them: aligned, with no more digits than they carry."""

from __future__ import annotations

from pipelines.evaluation.stats import Estimate

NONE = "–"


def percent(share: float | None) -> str:
    """A share in percent with one decimal: 0.802 is "80.2"."""
    return NONE if share is None else f"{100 * share:.1f}"


def interval(estimate: Estimate | None) -> str:
    """The bounds of an interval in percent: "[76.4, 83.9]"."""
    return NONE if estimate is None else f"[{percent(estimate.low)}, {percent(estimate.high)}]"


def points(difference: float | None) -> str:
    """A difference of shares in points, with its sign (a true minus): "+3.1"."""
    return NONE if difference is None else f"{100 * difference:+.1f}".replace("-", "−")


def signed(difference: float, unit: float) -> str:
    """A difference with its sign: of shares in points (a unit of 0.01), else as it is, to two decimals."""
    return f"{difference / unit:+.{1 if unit == 0.01 else 2}f}".replace("-", "−")


def p_value(p: float | None) -> str:
    """A p-value to three decimals; below that only that it is."""
    if p is None:
        return NONE
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def count(number: float | None) -> str:
    """A whole number with thin spaces between thousands."""
    return NONE if number is None else f"{number:,.0f}".replace(",", "\u202f")


def mean(number: float | None) -> str:
    """A mean, to three digits."""
    if number is None:
        return NONE
    return f"{number:.2f}" if abs(number) < 10 else f"{number:.1f}" if abs(number) < 100 else count(number)


def compact(number: float) -> str:
    """A number on an axis or at the end of a line: three significant digits, 0.0004 as "4e-4"."""
    if number == 0:
        return "0"
    if abs(number) >= 10_000 or abs(number) < 0.01:
        mantissa, _, exponent = f"{number:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "−")
    return (f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}").replace("-", "−")
