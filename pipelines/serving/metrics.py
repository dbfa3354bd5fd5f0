"""Figures of a server in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

BOUNDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds


class Metrics:
    """Counts since the server started."""

    def __init__(self) -> None:
        self.running = 0
        self._outcomes: Counter[str] = Counter()
        self._denied: Counter[int] = Counter()
        self._seconds: list[int] = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def ended(self, outcome: str, seconds: float) -> None:
        """A question ended: "answer", "error" or "left"."""
        self._outcomes[outcome] += 1
        self._seconds[sum(seconds > bound for bound in BOUNDS)] += 1
        self._sum += seconds

    def denied(self, status: int) -> None:
        """A request was not served."""
        self._denied[status] += 1

    def text(self, used: Mapping[str, float]) -> str:
        """All figures.

        Args:
            used: what endpoints have taken, by kind.
        """
        lines = ["# TYPE sqltrain_questions_running gauge", f"sqltrain_questions_running {self.running}"]
        lines.append("# TYPE sqltrain_questions_total counter")
        lines += [f'sqltrain_questions_total{{outcome="{name}"}} {n}' for name, n in sorted(self._outcomes.items())]
        lines.append("# TYPE sqltrain_denied_total counter")
        lines += [f'sqltrain_denied_total{{status="{status}"}} {n}' for status, n in sorted(self._denied.items())]
        lines.append("# TYPE sqltrain_question_seconds histogram")
        total = 0
        for bound, count in zip((*BOUNDS, "+Inf"), self._seconds, strict=True):
            total += count
            lines.append(f'sqltrain_question_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"sqltrain_question_seconds_sum {self._sum:.6f}", f"sqltrain_question_seconds_count {total}"]
        for name, value in sorted(used.items()):
            lines += [f"# TYPE sqltrain_endpoint_{name}_total counter", f"sqltrain_endpoint_{name}_total {value:g}"]
        return "\n".join(lines) + "\n"
