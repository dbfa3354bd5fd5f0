"""An evaluation's answers by question, kept so that none is made twice."""

import json
from collections.abc import Mapping
from pathlib import Path

from pipelines.benchmarks.prompt_schema import description_files
from pipelines.core.errors import DataError
from pipelines.core.files import digest, write_atomic
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Example, StopReason, Trajectory, from_dict, to_dict
from pipelines.stages.fingerprints import Digests

_digests = Digests(None)  # digests of the databases of kept answers


class KeptAnswers:
    """The episodes of each question, in one file a question.

    Only questions and answers are kept, no verdicts: another equality or another vote asks nothing again. The question
    of a mended gold query is asked again, for the oracle and a simulated user answer by that query. A broken episode is
    no answer, so it is asked again.

    Args:
        folder: holds the answers of one policy, asked in one way; both are in its name. None keeps nothing.
        shows_descriptions: whether the prompts show what the files of a benchmark say of a database's columns.
    """

    def __init__(self, folder: Path | None, shows_descriptions: bool = False) -> None:
        self._folder = folder
        self._shows_descriptions = shows_descriptions

    def read(self, question: Example) -> dict[int, Trajectory]:
        """A question's episodes by the number of their sample; {} if their file is absent or damaged."""
        path = self._path(question)
        if path is None or not path.is_file():
            return {}
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
            trajectories = [from_dict(Trajectory, row) for row in rows]
        except (DataError, RecursionError, TypeError, ValueError):
            return {}  # A disk that lost power leaves damaged files: the question is asked again, the file rewritten.
        return {trajectory.sample: trajectory for trajectory in trajectories}

    def write(self, question: Example, episodes: Mapping[int, Trajectory]) -> None:
        """Keep a question's episodes except the broken ones."""
        path = self._path(question)
        if path is None:
            return
        rows = []
        for sample in sorted(episodes):
            trajectory = episodes[sample]
            if trajectory.stop is not StopReason.BROKEN:
                rows.append(to_dict(trajectory))
        if rows:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(rows, ensure_ascii=False))

    def _path(self, question: Example) -> Path | None:
        """The file of a question: every field of it counts, and the bytes of a database file instead of its path.

        The files that describe the database count too, by their names and bytes, if prompts show them.
        """
        if self._folder is None:
            return None
        fields = to_dict(question)
        database_file = Path(question.database.location)
        dialect = DIALECTS[question.database.engine]
        if not dialect.is_server and database_file.is_file():
            fields["database"]["location"] = _digests.of(database_file)
        if self._shows_descriptions and question.database.engine == "sqlite":
            descriptions = {file.name: _digests.of(file) for file in description_files(database_file)}
            if descriptions:
                fields["descriptions"] = descriptions
        return self._folder / f"{digest(fields)}.json"
