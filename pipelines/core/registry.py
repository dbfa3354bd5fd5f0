"""The registries: each name that a recipe may use, and its implementation, ours or a plug-in's.

Both are registered in the same way. A plug-in is found in one of two ways:

- an installed package that declares an entry point, such as `[project.entry-points."sqltrain.rewards"]`;
- `plugins: [FILE_OR_MODULE]` in a recipe.

Either way its module is imported, and its decorators register what it adds:

    from pipelines.core.registry import reward

    @reward("my_short")
    def short(outcome, characters: int = 200) -> float:
        return float(len(outcome.trajectory.final_sql or "") <= characters)

Only the standard library is imported here, so that a SQL worker can use a registry without the cost of pydantic. The
types of rooms above (recipes, policies, networks) are not imported, not even for type checkers: `Any` stands for them.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from pipelines.core.errors import RecipeError

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel, ValidationInfo


# Kinds whose implementation is more than a function: the function together with its traits.

# Analyses of an outcome that a reward term may need: the tables and columns of both queries, the gold schema, the
# token pairs of both queries, and Spider's level of the gold query.
ANALYSES = frozenset({"schema", "gold_schema", "bigrams", "level"})


class RewardFunction(NamedTuple):
    """A term of a reward panel."""

    pay: Callable[..., Any]  # (outcome, **options) -> its value before its weight; if `by_turn`, a value for each turn.
    # lowest and highest value of a wrong answer; None for a case table, whose order is its own.
    wrong: tuple[float, float] | None = None
    right: tuple[float, float] | None = None  # lowest and highest value of a right answer; None as for `wrong`.
    by_turn: bool = False  # pays for turns, not for the episode, so that `grpo.credit=turn` knows which turn earned it.
    reads: Collection[str] = ANALYSES  # analyses that it needs: an outcome has those that its panel's terms read.


class Reader(NamedTuple):
    """The reader of one kind of source."""

    read: Callable[..., Any]  # (source, seed, root) -> the `Loaded` questions.
    # source -> the paths that decide what it reads, databases among them, there or not: stage keys hold their digests.
    # Without this function every file under the source's path decides.
    files: Callable[[Any], Iterator[Path]] | None = None
    addresses: Callable[[Any], Iterator[str]] | None = None  # source -> the servers that its questions name.
    equality: str | None = None  # the equality that the benchmark is published with.


class Equality(NamedTuple):
    """A named equality of two results."""

    compare: Callable[..., float]  # (result, gold result, gold) -> the score.
    rewrite: Callable[[str], str] | None = None  # applied to both queries before they run; None for nothing.
    suite: bool = False  # every database of the directory must agree.
    # bare: a SQLite prediction with a second semicolon is wrong, because the official script hands it to Python's
    # sqlite3 as it is.
    bare: bool = False
    graded: bool = False  # the score is a number and not a yes or no.
    timed: bool = False  # a right prediction is run against the gold query again and again, and paid by its speed.
    by_units: bool = False  # it needs the value units of both SELECT lists, for which the database's names are read.
    # by_file: an answer is compared with accepted result files (`evaluation/result_files.py`), not with the result of
    # a gold query.
    by_file: bool = False
    # by_outcome: outcomes of whole scripts are compared, which needs an engine that gives each episode a copy to
    # change (`Dialect.keeps_state`).
    by_outcome: bool = False
    # proof: "module:function" that decides by proof where it can: (pair, engine) -> (score or None, counterexample).
    proof: str = ""
    form: Literal["set", "bag"] = "bag"  # how the rows of two answers are compared to be one vote.


class Metric(NamedTuple):
    """A figure of an evaluation, declared once for the summary, the tables, the page, the CSV files and the docs."""

    # (records, equality, seed) -> the `Measure` of the unbroken greedy episodes, or of the sampled ones if there are no
    # others; None if it is unknown.
    measure: Callable[..., Any]
    unit: Literal["percent", "mean", "count"]  # form of the number: a share in percent, a mean, or a count.
    title: str  # its heading.
    about: str  # its meaning, in a few words.
    table: Literal["behaviour", "likeness", ""] = "behaviour"  # its table; "" for the numbers of `metrics.json` alone.
    sees_broken: bool = False  # whether `measure` is given the broken episodes too.


class PolicyMaker(NamedTuple):
    """The constructor of a policy, with the handling of the servers that it needs."""

    make: Callable[..., Any]  # (checkpoint, recipe, **options) -> the `Policy`, in each process that makes rollouts.
    # (checkpoint, recipe, step) -> the places that took them, or None if that is unknown: brings the weights of a
    # checkpoint to where the policy reads them, before a stage's processes start (`step` is None) and, in GRPO, at each
    # step, where it raises if no place took them. None if there is no such place: GRPO cannot train the
    # model behind such a policy.
    send_weights: Callable[[str, Any, int | None], Sequence[str] | None] | None = None
    # (checkpoint, recipe, folder, say, newest) -> a context in which the generating servers run, and that gives a
    # `Serving`; see `pipelines.rollout.policies.factories.serving`. None if nothing has to be started.
    serve: Callable[..., AbstractContextManager[Serving]] | None = None
    # (recipe, trains) -> None: raises, before a run's first stage, what would keep `serve` from starting; `trains` is
    # for GRPO. None if there is nothing to check.
    check_servers: Callable[[Any, bool], None] | None = None
    # recipe -> whether the policy's servers take low-rank adapters alone if they have their base; None if never.
    takes_adapters: Callable[[Any], bool] | None = None


class Serving(NamedTuple):
    """The recipe of a stage while its generating servers run."""

    recipe: Any  # the stage's `Recipe`, with the addresses of the servers that were started for it.
    training: tuple[str, ...] | None = None  # CUDA names of the GPUs that training may use; None for all.


class OptimizerMaker(NamedTuple):
    """The constructor of an optimiser."""

    # (network, settings, **options) -> a `torch.optim.Optimizer`; None leaves it to transformers, which makes AdamW of
    # the settings.
    make: Callable[..., Any]
    whole_matrices: bool = False  # it must see whole matrices, which DeepSpeed cuts up.


# Settings of `grpo` about the importance ratio.
RATIO_SETTINGS = ("clip_low", "clip_high", "level")


class LossFunction(NamedTuple):
    """A loss of GRPO."""

    # `TrackBatch` of pipelines/training/losses.py -> (), a micro-batch's part of a step's loss. A token whose advantage
    # is 0 adds nothing to it.
    compute: Callable[..., Any]
    # it averages over each micro-batch by itself: its rows then stay together.
    by_micro_batch: bool = False
    trl: str = ""  # TRL's name of the same loss, whose code then computes it for the full track.
    # Settings of `grpo` about the importance ratio that change the loss; () for a loss without a ratio.
    settings: tuple[str, ...] = RATIO_SETTINGS


T = TypeVar("T")
Function = TypeVar("Function")
FEW_NAMES = 8  # names that a message lists also if one of them is close to the name that was given
# Types of validation errors.
UNKNOWN_NAME = "unknown_name"
UNSUITED_NAME = "unsuited_name"
WRONG_OPTION = "wrong_option"
# One lock for all registries: a module that one of them imports may look up a part of another.
_LOADING = threading.RLock()
# Entry points of the installed packages, read once for all registries; their type in Python 3.11 lacks `select`.
_entry_points: Callable[[], Any] = functools.cache(metadata.entry_points)


@dataclass(frozen=True)
class RegisteredPart(Generic[T]):
    """A registered implementation."""

    value: T  # the function or class, or a function together with its traits.
    function: Any  # the function or class itself.
    module: str  # the name of the module that registered it.
    # the model of its options; None if the options are the function's own keyword parameters.
    options: type[BaseModel] | None


@dataclass(eq=False)
class Registry(Generic[T]):
    """Implementations of one kind by name."""

    noun: str  # the kind's name in messages ("reward term").
    group: str  # the group of entry points that plug-ins declare ("sqltrain.rewards").
    home: str  # our own module or package; all its modules are imported before the first look-up.
    fields: tuple[str, ...]  # the places in recipes that name such parts, as dotted paths; `*` stands for every item.
    leading: int = 1  # the number of a function's parameters before its options (its inputs).
    # (function, **traits) -> the registered value; None if it is the function.
    part: Callable[..., T] | None = None
    reads_installed: ClassVar[bool] = True  # a SQL worker is given its plug-ins, and looks for none
    _entries: dict[str, RegisteredPart[T]] = field(default_factory=dict)
    _models: dict[str, type[BaseModel]] = field(default_factory=dict)
    _is_loading: bool = False
    _is_loaded: bool = False

    def __call__(
        self, name: str, *, options: type[BaseModel] | None = None, **traits: Any
    ) -> Callable[[Function], Function]:
        """A decorator that registers a function or a class under a name, with its traits."""

        def register(function: Function) -> Function:
            value: Any = function
            if self.part is not None:
                value = self.part(function, **traits)
            module = str(getattr(function, "__module__", ""))
            entry = self._entries.get(name)
            if entry is not None and entry.module != module:
                raise RecipeError(
                    f"{self.noun} {name!r} is registered twice: by {entry.module} and by {module}",
                    "Give one of them another name.",
                )
            self._entries[name] = RegisteredPart(value, function, module, options)
            self._models.pop(name, None)
            return function

        return register

    def __getitem__(self, name: str) -> T:
        return self.entry(name).value

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._entries)

    def entry(self, name: str) -> RegisteredPart[T]:
        """The implementation registered under a name, with its function, module and options."""
        self._load()
        if name not in self._entries:
            raise RecipeError(f"there is no {self.noun} {name!r}", self._hint_at_names(name))
        return self._entries[name]

    def _hint_at_names(self, unknown_name: str) -> str:
        """The nearest name if there is one, and all names if there is none or they are few."""
        names = ", ".join(self._entries)
        all_names = f"There are: {names}."
        close_names = difflib.get_close_matches(unknown_name, self._entries, n=1)
        if not close_names:
            return all_names
        nearest = f"Did you mean {close_names[0]!r}?"
        if len(self._entries) <= FEW_NAMES:
            return f"{nearest} {all_names}"
        return nearest

    def check(self, name: str) -> str:
        """The name itself, for pydantic; an unknown one is a validation error that names the nearest one."""
        from pydantic_core import PydanticCustomError

        try:
            self.entry(name)
        except RecipeError as error:
            raise PydanticCustomError(UNKNOWN_NAME, "{said}", {"said": str(error)}) from None
        return name

    def check_options(self, field: str, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Validate, for pydantic, the options of the part that a section names in `field`; a wrong name fails there."""
        from pydantic import ValidationError
        from pydantic_core import PydanticCustomError

        if field not in info.data:
            return options
        name = info.data[field]
        model = self.options_model(name)
        try:
            model.model_validate(dict(options))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, first["loc"]))
            names = ", ".join(model.model_fields) or "none"
            if first["type"] == "extra_forbidden":
                message = f"{self.noun} {name!r} has no option {path!r}. It has: {names}"
            else:
                message = f"option {path!r} of {self.noun} {name!r}: {first['msg']}. Its options: {names}"
            raise PydanticCustomError(WRONG_OPTION, "{message}", {"message": message}) from None
        return options

    def options_model(self, name: str) -> type[BaseModel]:
        """The model of a part's options: the registered one, or its strictly typed keyword parameters."""
        from pydantic import ConfigDict, create_model

        entry = self.entry(name)
        if entry.options is not None:
            return entry.options
        if name not in self._models:
            signature = inspect.signature(entry.function, eval_str=True)
            parameters = list(signature.parameters.values())
            missing = inspect.Parameter.empty
            fields: dict[str, Any] = {}
            for parameter in parameters[self.leading :]:
                annotation = Any if parameter.annotation is missing else parameter.annotation
                default = ... if parameter.default is missing else parameter.default
                fields[parameter.name] = (annotation, default)
            strict = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
            self._models[name] = create_model(name, __config__=strict, **fields)
        return self._models[name]

    def used(self, values: Mapping[str, Any]) -> set[str]:
        """The names of this kind that a slice of a recipe (dotted path to JSON value) uses."""
        names: set[str] = set()
        for path in self.fields:
            for value in _values_at(values, path.split(".")):
                if isinstance(value, str):
                    names.add(value)
        return names

    def _load(self) -> None:
        """Import our own parts and those of installed packages, once; another thread waits until all are there.

        What could not be imported is tried again at the next look-up.
        """
        if self._is_loaded:
            return
        with _LOADING:
            if self._is_loaded or self._is_loading:  # a module that is being imported may look up a part
                return
            self._is_loading = True
            try:
                self._import_parts()
            finally:
                self._is_loading = False
            self._is_loaded = True

    def _import_parts(self) -> None:
        home = importlib.import_module(self.home)
        for module in pkgutil.walk_packages(getattr(home, "__path__", ()), f"{self.home}."):
            importlib.import_module(module.name)
        if not self.reads_installed:
            return
        for point in _entry_points().select(group=self.group):
            try:
                point.load()
            except Exception as error:  # a stranger's module may raise anything
                raise RecipeError(
                    f"the plug-in {point.value!r} of {self.group} cannot be imported: {error}",
                    "Mend that package, or uninstall it.",
                ) from error


def _values_at(value: Any, path: Sequence[str]) -> Iterator[Any]:
    """The values of nested JSON at a path, whose step `*` stands for every item of a list."""
    if not path:
        yield value
    elif path[0] == "*" and isinstance(value, list):
        for item in value:
            yield from _values_at(item, path[1:])
    elif path[0] == "*":
        return
    elif isinstance(value, Mapping) and path[0] in value:
        yield from _values_at(value[path[0]], path[1:])


REWARDS: Registry[RewardFunction] = Registry(
    "reward term", "sqltrain.rewards", "pipelines.rewards.terms", ("rewards.*.term",), part=RewardFunction
)
READERS: Registry[Reader] = Registry(
    "reader",
    "sqltrain.readers",
    "pipelines.benchmarks",
    ("benchmark.kind", "data.sft.kind", "data.rl.*.kind", "data.dev.kind"),
    leading=3,
    part=Reader,
)
PROTOCOLS: Registry[type[Any]] = Registry("protocol", "sqltrain.protocols", "pipelines.protocols", ("protocol.name",))
# Classes derived from `Dialect` (pipelines/sql/dialects/dialect.py), which is above this room.
DIALECTS: Registry[type[Any]] = Registry("SQL dialect", "sqltrain.dialects", "pipelines.sql.dialects", ())
EQUALITIES: Registry[Equality] = Registry(
    "equality",
    "sqltrain.equalities",
    "pipelines.sql.equalities.compare",
    ("execution.equality", "benchmark.equality", "benchmark.equalities.*", "evaluation.equalities.*"),
    leading=3,
    part=Equality,
)
METRICS: Registry[Metric] = Registry(
    "metric", "sqltrain.metrics", "pipelines.evaluation.metrics", ("evaluation.metrics.*",), leading=3, part=Metric
)
FILTER_RULES: Registry[Callable[[Any], bool]] = Registry(
    "filter rule", "sqltrain.filter_rules", "pipelines.curation.filtering", ("filter.drop.*", "grpo.drop.*")
)
OPTIMIZERS: Registry[OptimizerMaker] = Registry(
    "optimizer",
    "sqltrain.optimizers",
    "pipelines.training.optimizers",
    ("sft.optimizer.kind", "grpo.optimizer.kind"),
    leading=2,
    part=OptimizerMaker,
)
LOSSES: Registry[LossFunction] = Registry(
    "loss", "sqltrain.losses", "pipelines.training.losses", ("grpo.loss",), part=LossFunction
)
POLICIES: Registry[PolicyMaker] = Registry(
    "policy",
    "sqltrain.policies",
    "pipelines.rollout.policies.factories",
    ("rollout.policy",),
    leading=2,
    part=PolicyMaker,
)
ALL: tuple[Registry[Any], ...] = (
    REWARDS,
    READERS,
    PROTOCOLS,
    DIALECTS,
    EQUALITIES,
    METRICS,
    FILTER_RULES,
    OPTIMIZERS,
    LOSSES,
    POLICIES,
)

# Decorators: @reward("name")
reward = REWARDS
reader = READERS
protocol = PROTOCOLS
dialect = DIALECTS
equality = EQUALITIES
metric = METRICS
filter_rule = FILTER_RULES
optimizer = OPTIMIZERS
loss = LOSSES
policy = POLICIES
