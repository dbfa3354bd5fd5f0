"""The recipe of an adaptation, as a file that a person reads and edits: `recipes/NAME.yaml` of the working folder."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.adaptation.questions import AdaptationQuestions
from pipelines.core.errors import DataError
from pipelines.core.files import write_atomic, writing_to
from pipelines.recipe import recipes
from pipelines.recipe.checkpoint import folder_of, read_card, require_sound
from pipelines.recipe.config import Recipe
from pipelines.recipe.recipes import CONF
from pipelines.recipe.yaml_files import read_yaml, yaml_text
from pipelines.rollout.checkpoint_files import weight_files
from pipelines.rollout.gguf_model import is_gguf, read_header

# The model that is adapted: the tiny one, one of ours, or any from a folder or the hub.

RECIPE = "sql_trail"
TINY = "scales/tiny"
SMALL = 200_000_000  # bytes of weights of a checkpoint of the tiny model's kind
LAPTOP = 300_000_000  # weights of a language model up to which all of them are trained, on a CPU too
LAPTOP_RECIPE = "smollm2"
FETCHED = Path("build/models")  # where `make smollm2` puts a model from the package index
LORA = {"rank": 32, "alpha": 64}
RATES = {"sft": 1e-4, "grpo": 1e-5}  # of adapters: ten times those of whole models
CHARS = 2  # of a schema, that a token of the tiny tokenizer stands for
CONTEXTS = (1024, 2048)  # of the tiny model, in tokens
EPISODE = 300  # tokens beside the schema
MARGIN = 64  # of a context, that no episode fills
SAMPLED = ("difficulty", "grpo", "evaluation")  # sections with a budget of tokens


@dataclass(frozen=True)
class TrainingStart:
    """The start of training."""

    includes: tuple[str, ...]  # files of `conf/`, as a recipe includes them
    settings: dict[str, Any]  # values of the recipe's sections beside them
    scale: Literal["tiny", "laptop", "gpu"]  # the smallest machine that trains it in minutes, and so its sizes
    about: str  # in a few words, for a person


def training_start(model: str | None, recipe: str | None, schema_chars: int) -> TrainingStart:
    """The start of training: the weights, and the recipe.

    Args:
        model: a name of conf/models, a folder, a GGUF file or a hub name; None for the tiny model.
        recipe: a shipped one, by name; None for that of a checkpoint's card, else one that suits the model's size.
        schema_chars: the length of the schema in a prompt.
    """
    about_adapters = f"by LoRA adapters of rank {LORA['rank']}"

    def large(source: str, name: str, about: str) -> TrainingStart:
        settings: dict[str, Any] = {"model": {"source": source, "compute_dtype": "bfloat16", "lora": LORA}}
        settings |= {stage: {"optimizer": {"lr": rate}} for stage, rate in RATES.items()}
        return TrainingStart((f"recipes/{name}",), settings, "gpu", f"{about}, {about_adapters}")

    def language_model(source: str, n_weights: int, shipped: str | None, about: str) -> TrainingStart:
        if n_weights > LAPTOP:
            return large(source, _known(shipped or RECIPE), about)
        settings = {"model": {"source": source}}
        return TrainingStart(
            (f"recipes/{_known(shipped or LAPTOP_RECIPE)}",), settings, "laptop", f"{about}, all of its weights"
        )

    if model is None:
        context = next((size for size in CONTEXTS if schema_chars // CHARS + EPISODE <= size), None)
        name = _known(recipe or RECIPE)
        if context is None:
            raise DataError(
                f"the schema is some {schema_chars // CHARS:,} tokens: too long for the tiny model",
                "Hide tables in the card, or pass --model with a language model.",
            )
        most = context - MARGIN
        settings = {"model": {"tiny": {"context": context}}, "sft": {"max_tokens": most}}
        settings |= {stage: {"sampling": {"episode_tokens": most}} for stage in SAMPLED}
        return TrainingStart((f"recipes/{name}", TINY), settings, "tiny", "the tiny model, made from scratch")
    model = source_of(model)
    if is_gguf(model):
        file = Path(model).expanduser().resolve()
        n_weights = read_header(file).n_weights
        about = f"{file.name} ({n_weights / 1e6:,.0f} million weights)"
        return language_model(str(file), n_weights, recipe, about)
    folder = folder_of(Path(model))
    if not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        from huggingface_hub import HfApi

        try:
            is_known = HfApi().repo_exists(model)
        except Exception:  # the hub is out of reach, by whatever its client raises: the loading of the model will fail
            is_known = True
        if not is_known:
            raise DataError(f"the hub has no model {model}", "Check the spelling; a private one needs HF_TOKEN.")
        return large(model, _known(recipe or RECIPE), model)
    if not (folder / "config.json").is_file():
        raise DataError(f"no model in {folder}", "Pass a folder that holds a config.json, or a hub name.")
    require_sound(folder)
    card, place = read_card(folder), str(folder.resolve())
    shipped = recipe or (card.recipe if card is not None and card.recipe in recipes.recipe_names() else None)
    if is_small(place):
        settings = {"model": {"source": place}}
        includes = (f"recipes/{_known(shipped or RECIPE)}", TINY)
        begun = TrainingStart(includes, settings, "tiny", f"{place}, all of its weights")
    else:
        begun = language_model(place, count_weights(folder), shipped, f"{place} ({_bytes(folder) / 1e9:.1f} GB)")
    if card is None:
        return begun
    # The prompt and the budgets are those of the checkpoint's own card.
    sampling = card.sampling.model_dump(mode="json", include={"turn_tokens", "episode_tokens"})
    own = {"protocol": card.protocol.model_dump(mode="json"), **{stage: {"sampling": sampling} for stage in SAMPLED}}
    return dataclasses.replace(begun, settings=recipes.laid_over(begun.settings, own))


def source_of(model: str) -> str:
    """The source of a model of conf/models by its name, or the beginning of its name; any other model as it is.

    A file that was fetched from the package index comes before the hub.
    """
    named = sorted(path for path in (CONF / "models").glob("*.yaml") if path.stem.split("_")[0] == model)
    exact = CONF / "models" / f"{model}.yaml"
    if exact.is_file():
        named = [exact]
    if len(named) != 1 or model == "tiny":
        return model
    source = str(read_yaml(named[0])["model"]["source"])
    fetched = sorted(FETCHED.glob(f"*/{source.rpartition('/')[2]}*.gguf"))
    return str(fetched[0]) if fetched else source


def count_weights(folder: Path) -> int:
    """The number of a checkpoint's weights, from the heads of its files."""
    from safetensors import safe_open

    count = 0
    for path in weight_files(folder):
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                count += math.prod(tensors.get_slice(name).get_shape())
    return count


def is_small(source: str) -> bool:
    """Whether a laptop trains this model: the tiny one, or a checkpoint of about its size."""
    return source == "tiny" or 0 < _bytes(Path(source).expanduser()) <= SMALL


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder)) if folder.is_dir() else 0


def _known(recipe: str) -> str:
    if recipe not in recipes.recipe_names():
        recipes.load(recipe)  # names the nearest one
        raise DataError(
            f"{recipe} is a file of your own", f"--recipe takes one of {', '.join(recipes.recipe_names())}."
        )
    return recipe


FOLDER = Path("recipes")
INBOX = "feedback/inbox"  # the place of confirmed answers of `sqltrain serve --feedback feedback`
MANY = 1000  # questions to train on, from which on those that teach most are chosen by their difficulty
LARGE_EPOCHS, LARGE_BATCH = 3, 16  # passes over a few hundred questions, and questions of a step
SAMPLES = 2  # demonstrations of a question for the tiny model, which differ in their words and their mistakes
SHOWN, MOST_EPOCHS = 5_000, 40  # demonstrations that it must see before it speaks at all, and how often each of them
SMALL_STEPS = 12  # of its GRPO
LAPTOP_SHOWN, LAPTOP_EPOCHS = 600, 8  # demonstrations that a language model should see, and how often each at most
LAPTOP_SIZES: dict[str, Any] = {
    "grpo": {"questions_per_step": 8, "group": 8, "micro_batch": 64, "steps": 12, "drop_zero_variance": True},
    "evaluation": {"samples": 4, "ks": [1, 2, 4]},
    "rollout": {"processes": 2, "slots": 32, "shard": 32},
    "hardware": {"micro_tokens": 2048},
}
HEAD = """\
# A model learns to answer questions about the database {name}.
#
# Model      {about}
# Command    sqltrain adapt {name}
#            sqltrain run {place}      the same stages, without the page and the promotion
# Questions  {questions}
# Made from  {made_from}: every key that this file does not set is theirs; `sqltrain show {place}` prints them all.
#            Edit what you like: `sqltrain adapt {name}` without options runs this file as it is.
"""


def place(name: str) -> Path:
    """The path of that database's recipe, in the working folder."""
    return FOLDER / f"{name}.yaml"


def recipe_values(name: str, start: TrainingStart, questions: AdaptationQuestions) -> dict[str, Any]:
    """The recipe's keys and values."""
    pool = {part: {**questions.source, "split": part} for part in questions.counts}
    data: dict[str, Any] = {"sft": pool["train"], "rl": [pool["train"]], "dev": pool["dev"]}
    data["test"] = [{"name": name, **pool["test"]}]
    data["drop_empty"] = True  # any query without rows would be right for a question whose gold SQL gives none
    # How often so many questions are shown, and how many of them a step asks.
    trained, shipped = questions.counts["train"], start.includes[0].partition("/")[2]
    stages = recipes.load(shipped, [f"include={scale}" for scale in start.includes[1:]]).stages
    sizes: dict[str, Any] = {"difficulty": {"candidates": None, "keep": None, "explore_parts": []}}
    if trained < MANY:
        sizes = {"stages": [stage for stage in stages if stage != "difficulty"]}
    if start.scale == "laptop":
        epochs = min(LAPTOP_EPOCHS, max(1, round(LAPTOP_SHOWN / max(1, trained))))
        by_prefix = {"batch": 16, "micro_batch": 16, "group_by": "prefix", "epochs": epochs}
        sizes |= {**LAPTOP_SIZES, "filter": {"keep": None}, "sft": by_prefix}
    elif start.scale == "tiny":
        sizes |= {"synthesis": {"samples": SAMPLES}, "filter": {"per_example": SAMPLES}}
        epochs = min(MOST_EPOCHS, max(1, round(SHOWN / (SAMPLES * trained))))
        sizes |= {"sft": {"epochs": epochs}, "grpo": {"steps": SMALL_STEPS, "drop_zero_variance": True}}
    else:
        sizes["sft"] = {"batch": LARGE_BATCH, "micro_batch": 1, "epochs": LARGE_EPOCHS}
        grpo = {"epochs": LARGE_EPOCHS, "questions_per_step": min(LARGE_BATCH, trained), "micro_batch": 1}
        sizes["grpo"] = {**grpo, "drop_zero_variance": True}
    return {
        "name": name,
        "title": f"Questions about {name}",
        "include": [*start.includes],
        "data": data,
        **recipes.laid_over(sizes, start.settings),
        "nightly": {"inbox": INBOX},
    }


def write(name: str, values: Mapping[str, Any], start: TrainingStart, questions: AdaptationQuestions) -> Path | None:
    """Write the recipe. One that is there and differs is kept as `NAME.yaml.old-1` and so on; that path is returned."""
    where = place(name)
    counts = ", ".join(f"{count} to {_USES[part]}" for part, count in questions.counts.items())
    head = HEAD.format(name=name, about=start.about, place=where, questions=counts, made_from=", ".join(start.includes))
    values = json.loads(json.dumps(values))  # no part is the same as another one, or YAML would refer to it
    text = head + yaml_text(values)
    with writing_to(where, "Run it in a folder of your own."):
        where.parent.mkdir(parents=True, exist_ok=True)
        before = where.read_text(encoding="utf-8") if where.is_file() else text
        old = None
        if before != text:
            number = next(n for n in itertools.count(1) if not where.with_suffix(f".yaml.old-{n}").exists())
            old = where.with_suffix(f".yaml.old-{number}")
            write_atomic(old, before)
        write_atomic(where, text)
    return old


_USES = {"train": "train on", "dev": "watch training by", "test": "measure by"}


def last_training_stage(recipe: Recipe) -> str:
    """The name of the recipe's last training stage; a DataError if it has no training or no evaluation."""
    last = [name for name in ("sft", "grpo") if name in recipe.stages]
    if not last or "evaluate" not in recipe.stages:
        raise DataError(f"recipe {recipe.name} lacks a stage", "To adapt it needs evaluate, and sft or grpo.")
    return last[-1]
