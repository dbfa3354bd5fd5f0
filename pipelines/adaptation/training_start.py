"""The model that is adapted, the tiny one or any other, and the shipped recipe that it is trained by."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.adaptation.weight_count import count_weights, is_hub_name
from pipelines.core.errors import DataError
from pipelines.recipe import recipes
from pipelines.recipe.checkpoint import CheckpointCard, folder_of, read_card, require_sound
from pipelines.recipe.yaml_files import read_yaml
from pipelines.rollout.checkpoint_files import weight_files
from pipelines.rollout.gguf_model import is_gguf, read_header

DEFAULT_RECIPE = "sql_trail"
TINY = "scales/tiny"
SMALL_BYTES = 200_000_000  # weights of a checkpoint of the tiny model's kind
LAPTOP_WEIGHTS = 300_000_000  # weights of a language model up to which all of them are trained, on a CPU too
LAPTOP_RECIPE = "smollm2"
FETCHED = Path("build/models")  # folder in which `make smollm2` puts a model from the package index
LORA = {"rank": 32, "alpha": 64}
# SFT of a language model that speaks the protocol already: it has names to learn, and each further pass over templated
# questions costs it the words of a person.
TAUGHT_SFT: dict[str, Any] = {"epochs": 1, "optimizer": {"lr": 1e-4}}
ADAPTER_RATES = {"sft": 1e-4, "grpo": 1e-5}  # learning rates: ten times those of whole models
CHARS_A_TOKEN = 2  # characters of a schema to a token of the tiny tokenizer
TINY_CONTEXTS = (1024, 2048)  # tokens
EPISODE_TOKENS = 300  # tokens of an episode without the schema
MARGIN = 64  # tokens of a context that no episode fills
SAMPLED_SECTIONS = ("difficulty", "grpo", "evaluation")  # sections of a recipe with a budget of tokens
Scale = Literal["tiny", "laptop", "gpu"]


@dataclass(frozen=True)
class TrainingStart:
    """The start of training."""

    includes: tuple[str, ...]  # files of `conf/`, as a recipe includes them
    settings: dict[str, Any]  # values of the recipe's sections that no include sets
    scale: Scale  # the smallest machine that trains it in minutes, and so its sizes
    about: str  # a few words for a person


def training_start(model: str | None, recipe: str | None, schema_chars: int) -> TrainingStart:
    """The start of training: the weights, and the recipe.

    Args:
        model: a name of conf/models, a folder, a GGUF file or a hub name; None for the tiny model.
        recipe: a shipped one, by name; None for that of a checkpoint's card, else one that suits the model's size.
        schema_chars: the length of the schema in a prompt.
    """
    if model is None:
        return _tiny_start(recipe, schema_chars)
    source = source_of(model)
    if is_gguf(source):
        file = Path(source).expanduser().resolve()
        read_header(file)  # a file that is none is told first
        return _start_by_size(str(file), recipe)
    if is_hub_name(source):
        return _start_by_size(source, recipe)
    folder = folder_of(Path(source))
    if not (folder / "config.json").is_file():
        hint = "Pass a folder that holds a config.json, or a hub name."
        raise DataError(f"no model in {folder}", hint)
    require_sound(folder)
    return _checkpoint_start(folder, recipe)


def _tiny_start(recipe: str | None, schema_chars: int) -> TrainingStart:
    """The tiny model, with a context that its schema leaves room in."""
    schema_tokens = schema_chars // CHARS_A_TOKEN
    contexts = [size for size in TINY_CONTEXTS if schema_tokens + EPISODE_TOKENS <= size]
    shipped = require_shipped(recipe or DEFAULT_RECIPE)
    if not contexts:
        raise DataError(
            f"the schema is some {schema_tokens:,} tokens: too long for the tiny model",
            "Hide tables in the card, or pass --model with a language model.",
        )
    context = contexts[0]
    budget = context - MARGIN
    settings: dict[str, Any] = {}
    settings["model"] = {"tiny": {"context": context}}
    settings["sft"] = {"max_tokens": budget}
    for section in SAMPLED_SECTIONS:
        settings[section] = {"sampling": {"episode_tokens": budget}}
    includes = (f"recipes/{shipped}", TINY)
    return TrainingStart(includes, settings, "tiny", "the tiny model, made from scratch")


def _checkpoint_start(folder: Path, recipe: str | None) -> TrainingStart:
    """A checkpoint; the prompt and the budgets are those of its card, if it has one."""
    card = read_card(folder)
    source = str(folder.resolve())
    shipped = recipe
    if shipped is None and card is not None and card.recipe in recipes.recipe_names():
        shipped = card.recipe
    if is_small(source):
        shipped = require_shipped(shipped or DEFAULT_RECIPE)
        includes = (f"recipes/{shipped}", TINY)
        model_settings = {"model": {"source": source}}
        start = TrainingStart(includes, model_settings, "tiny", f"{source}, all of its weights")
    else:
        start = _start_by_size(source, shipped)
    if card is None:
        return start
    settings = recipes.laid_over(start.settings, _card_settings(card))
    if start.scale == "laptop":
        settings["sft"] = TAUGHT_SFT
    return dataclasses.replace(start, settings=settings)


def _card_settings(card: CheckpointCard) -> dict[str, Any]:
    sampling = card.sampling.model_dump(mode="json", include={"turn_tokens", "episode_tokens"})
    # Every setting, for those that a key leaves out would be the recipe's.
    settings: dict[str, Any] = {"protocol": dict(card.protocol)}
    for section in SAMPLED_SECTIONS:
        settings[section] = {"sampling": sampling}
    return settings


def _start_by_size(source: str, recipe: str | None) -> TrainingStart:
    """A language model: all weights of a small one are trained, adapters of a large one or of one of unknown size.

    The laptop recipe's own model is small wherever it lies.
    """
    n_weights = count_weights(source)
    if n_weights is None:
        about = f"{source}, whose size nothing here tells"
        is_large = source != recipes.load(LAPTOP_RECIPE).model.source
    else:
        about = f"{source} ({n_weights / 1e6:,.0f} million weights)"
        is_large = n_weights > LAPTOP_WEIGHTS
    if is_large:
        shipped = require_shipped(recipe or DEFAULT_RECIPE)
        return _adapter_start(source, shipped, about)
    shipped = require_shipped(recipe or LAPTOP_RECIPE)
    settings = {"model": {"source": source}}
    return TrainingStart((f"recipes/{shipped}",), settings, "laptop", f"{about}, all of its weights")


def _adapter_start(source: str, shipped: str, about: str) -> TrainingStart:
    settings: dict[str, Any] = {}
    settings["model"] = {"source": source, "compute_dtype": "bfloat16", "lora": LORA}
    for stage, rate in ADAPTER_RATES.items():
        settings[stage] = {"optimizer": {"lr": rate}}
    words = f"{about}, by LoRA adapters of rank {LORA['rank']}"
    return TrainingStart((f"recipes/{shipped}",), settings, "gpu", words)


def source_of(model: str) -> str:
    """The source of a model of conf/models by its name, or the beginning of its name; any other model as it is.

    A file that was fetched from the package index comes before the hub.
    """
    if "/" in model:
        return model
    folder = recipes.CONF / "models"
    matches = [folder / f"{model}.yaml"]
    if not matches[0].is_file():
        matches = [path for path in folder.glob("*.yaml") if path.stem.partition("_")[0] == model]
    if len(matches) != 1 or model == "tiny":
        return model
    (file,) = matches
    settings = read_yaml(file)
    source = str(settings["model"]["source"])
    _, _, name = source.rpartition("/")
    fetched = sorted(FETCHED.glob(f"*/{name}*.gguf"))
    if not fetched:
        return source
    return str(fetched[0])


def is_small(source: str) -> bool:
    """Whether a laptop trains this model: the tiny one, or a checkpoint of about its size."""
    if source == "tiny":
        return True
    folder = Path(source).expanduser()
    return 0 < weight_bytes(folder) <= SMALL_BYTES


def weight_bytes(folder: Path) -> int:
    """The bytes of a checkpoint's weights; 0 if there is no such folder."""
    if not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in weight_files(folder))


def require_shipped(recipe: str) -> str:
    """The name of a shipped recipe; an error for any other."""
    shipped = recipes.recipe_names()
    if recipe in shipped:
        return recipe
    recipes.load(recipe)  # its error names the nearest one
    names = ", ".join(shipped)
    raise DataError(f"{recipe} is a file of your own", f"--recipe takes one of {names}.")
