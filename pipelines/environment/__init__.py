"""Episodes of a recipe as an environment that any trainer can drive: `reset`, `step`, a reward at the end."""

from pipelines.environment.core import Environment, Session, StepResult

__all__ = ["Environment", "Session", "StepResult"]
