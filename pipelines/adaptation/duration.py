"""The minutes that an adaptation of a language model takes on a CPU, guessed before anything is loaded.

The guess multiplies the work that the recipe counts by the machine's speed at matrix products, measured on the spot.
The shares below are cautious ones of SmolLM2-135M on two cores (docs/results/real_model.md); other work on the machine,
or longer episodes, easily double the minutes.
"""

import time
from collections.abc import Mapping

from pipelines.adaptation.estimate import Work
from pipelines.adaptation.weight_count import count_weights
from pipelines.databases.schema_filter import CHARS_PER_TOKEN
from pipelines.recipe.config import Recipe
from pipelines.rollout.policies.factories import device
from pipelines.stages.stage import kind_of

INSTRUCTION_TOKENS = 110  # tokens of the instructions around a schema
OWN_TOKENS = 120  # tokens of a demonstration or an episode behind its schema
DECODED_TOKENS = 60  # tokens that the agent writes in an episode
FLOP_A_TRAINED_TOKEN = 6  # floating-point operations a weight: a forward and a backward pass
FLOP_A_DECODED_TOKEN = 2  # a forward pass alone
TRAINING_SHARE = 0.36  # share of the speed of matrix products that training reaches
DECODING_SHARE = 0.1  # share that decoding reaches: it reads all weights for each token of a batch
# Sizes of the measured product: those of a layer of SmolLM2.
ROWS = 512
WIDTH = 576
OUTPUTS = 1536
ROUNDS = 4
TIMED_PRODUCTS = 50  # products of a round: the processor time of other threads is told some milliseconds late


def minutes_on_cpu(recipe: Recipe, works: Mapping[str, Work], schema_chars: int) -> dict[str, float]:
    """Minutes of the stages that train or ask a language model on a CPU, by name.

    It is empty for a GPU, for the tiny model and for a model whose size nothing tells.

    Args:
        works: the work of each stage that is to do (`estimate.estimate`).
        schema_chars: the length of the schema in a prompt.
    """
    if not _trains_on_cpu(recipe):
        return {}
    n_weights = count_weights(recipe.model.source)
    if n_weights is None:
        return {}
    flop_rate = product_speed(recipe.model.compute_dtype)
    prompt_tokens = INSTRUCTION_TOKENS + schema_chars / CHARS_PER_TOKEN
    trained_token_s = FLOP_A_TRAINED_TOKEN * n_weights / (flop_rate * TRAINING_SHARE)
    decoded_token_s = FLOP_A_DECODED_TOKEN * n_weights / (flop_rate * DECODING_SHARE)

    rows_a_prompt = 1
    if recipe.sft.group_by == "prefix":
        rows_a_prompt = recipe.sft.micro_batch
    demonstration_tokens = OWN_TOKENS + prompt_tokens / rows_a_prompt
    demonstration_s = demonstration_tokens * trained_token_s
    episode_s = DECODED_TOKENS * decoded_token_s
    trained_episode_tokens = OWN_TOKENS + prompt_tokens / recipe.grpo.group
    trained_episode_s = episode_s + trained_episode_tokens * trained_token_s
    # A model that has not learned the protocol writes on to the end of each turn's budget.
    untrained_tokens = recipe.evaluation.sampling.turn_tokens * recipe.protocol.max_turns_eval
    seconds_a_unit = {
        "evaluate_model": untrained_tokens * decoded_token_s,
        "sft": recipe.sft.batch * demonstration_s,
        "difficulty": episode_s,
        "grpo": trained_episode_s,
        "evaluate_sft": episode_s,
        "evaluate_grpo": episode_s,
    }
    minutes = {}
    for stage, work in works.items():
        seconds = seconds_a_unit.get(kind_of(stage))
        if seconds is not None and work.number:
            minutes[stage] = work.number * seconds / 60
    return minutes


def _trains_on_cpu(recipe: Recipe) -> bool:
    return recipe.hardware.device != "cuda" and device(recipe, 0) == "cpu"


def product_speed(dtype_name: str) -> float:
    """Floating-point operations a second of a matrix product, in the fastest of some rounds.

    Processor time counts, shared among the threads: other work on the machine should not change the plan.
    """
    import torch

    dtype = getattr(torch, dtype_name)
    rows = torch.ones(ROWS, WIDTH, dtype=dtype)
    weight = torch.ones(OUTPUTS, WIDTH, dtype=dtype)
    fastest = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(TIMED_PRODUCTS):
            torch.nn.functional.linear(rows, weight)
        elapsed = time.process_time() - started
        fastest = min(fastest, elapsed / TIMED_PRODUCTS)
    return 2 * ROWS * WIDTH * OUTPUTS * torch.get_num_threads() / fastest
