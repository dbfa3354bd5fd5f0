"""One error tree: what the user did, and what a boundary did.

    SqltrainError
    ├── UserError          the user can mend it: one plain line, exit code 2
    │   ├── RecipeError      unknown key, wrong type, unknown recipe or variant
    │   ├── DataError        missing file or database, malformed line, broken contract
    │   └── ResourceError    no disk space, no such Python, no such device
    └── BoundaryError      something outside this process failed: retried, never scored as a wrong answer
        ├── DatabaseError    a database or the worker that reads it
        ├── EndpointError    a model behind HTTP
        └── TrainingError    the training child died or fell silent
            └── StoppedError   it was asked to stop: no other attempt is made

Errors inside an episode (a wrong query, a malformed turn) are not exceptions: they are data.
"""


class SqltrainError(Exception):
    """Base of all errors that sqltrain raises on purpose.

    Args:
        message: what happened and where, in one line.
        hint: what to do about it, in one line; may be empty.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class UserError(SqltrainError):
    """The user can mend it."""

    exit_code = 2


class RecipeError(UserError):
    """A recipe or an override that cannot be understood."""


class DataError(UserError):
    """A dataset, a file or a database that is missing or malformed."""


class ResourceError(UserError):
    """The machine lacks something: disk, memory, a device, an interpreter."""


class BoundaryError(SqltrainError):
    """Something outside this process failed."""


class DatabaseError(BoundaryError):
    """A database, or the worker process that reads it, failed."""


class EndpointError(BoundaryError):
    """A model endpoint failed after its retries."""


class TrainingError(BoundaryError):
    """The training child process died or fell silent."""


class StoppedError(TrainingError):
    """Training was asked to stop, and left a checkpoint. Whoever runs it stops, too."""
