"""The models that are trained: a tiny Qwen3 made from scratch with its own tokenizer, or any causal language model."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]
from torch import Tensor

from pipelines.recipe.config import Lora, Model, TinyModel
from pipelines.rollout.model_loading import hide_bars, load
from pipelines.training.plan import SERVED

PAD = "<|pad|>"
END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The ends of an answer, for servers: by the model's type they take the chat template for Qwen's.
ANSWER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close": "<|end|>"}},
}
# A word with the space before it is one piece, so spaced SQL and schema text share their tokens; digits and punctuation
# stand alone, so that numbers and quoted values can be copied.
PIECES = r" ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]|\s"


def make_tiny(model: Model, corpus: Iterable[str], tags: Sequence[str], out: Path, seed: int) -> None:
    """Make a model that has learned nothing, with a tokenizer that knows the corpus, as a normal checkpoint folder.

    Args:
        model: its `tiny` part gives the sizes.
        corpus: texts that the tokenizer's merges are learned from (prompts, agent turns, observations).
        tags: protocol tags; each becomes a single token.
        seed: of the weights.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hide_bars()
    tiny = model.tiny
    tokenizer = _tiny_tokenizer(tiny, corpus, tags)
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=tiny.width,
        intermediate_size=tiny.ffn,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.heads,
        head_dim=tiny.width // tiny.heads,
        max_position_embeddings=tiny.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    network = Qwen3ForCausalLM(shape)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    network.save_pretrained(out)


def _corpus_without_tags(corpus: Iterable[str], tags: Sequence[str]) -> Iterator[str]:
    """The corpus without the protocol's tags: they are tokens already, and must not spend merges."""
    for text in corpus:
        for tag in tags:
            text = text.replace(tag, "")
        yield text


def _tiny_tokenizer(tiny: TinyModel, corpus: Iterable[str], tags: Sequence[str]) -> Any:
    """A tokenizer that knows the corpus; each tag is one token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, *ROLES]
    # A byte-level BPE: any text encodes and decodes back exactly.
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(tiny.vocabulary - len(tags), 256 + len(special)),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus_without_tags(corpus, tags), trainer=trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=TEMPLATE,
        model_max_length=tiny.context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.response_template = ANSWER
    return tokenizer


def load_to_train(path_or_name: str | Path, model: Model) -> tuple[Any, Any]:
    """A model and its tokenizer, with the weights under training in float32: all, or none of a base under adapters."""
    if model.lora is None:
        return load(path_or_name, model, torch.float32)
    return load(path_or_name, model, quantized=model.lora.bits is not None)


def adapters(lora: Lora | None) -> Any:
    """The PEFT configuration of a recipe's low-rank adapters, on every linear layer but the head; None for none."""
    if lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear",
    )


BASE = "base_model.model."  # PEFT's prefix of a name
ADAPTER = "default"  # the name that PEFT gives to the only adapter


def whole_weights(trainer: Any) -> tuple[Any, dict[str, Tensor]]:
    """A network that saves the policy, and the policy's weights by its names; the policy itself is left as it is."""
    network = trainer.accelerator.unwrap_model(trainer.model)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not hasattr(network, "peft_config"):
        return network, weights
    lora = network.peft_config[ADAPTER]
    scaling = lora.lora_alpha / lora.r
    plain_weights = _dequantized(network, weights)
    return _saving_network(network.get_base_model()), merged(plain_weights, scaling)


def _dequantized(network: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with 4-bit matrices in the form that the forward computes with; their scales are left out."""
    plain_weights = dict(weights)
    for name, value in network.named_parameters():
        state = getattr(value, "quant_state", None)
        if state is None:
            continue
        from bitsandbytes.functional import dequantize_4bit

        for key in list(plain_weights):
            if key.startswith(f"{name}."):
                del plain_weights[key]
        plain_weights[name] = dequantize_4bit(value.data, state)
    return plain_weights


def _saving_network(network: Any) -> Any:
    """The network that saves whole weights: itself or, for a quantized one, an empty network of its architecture."""
    if not getattr(network, "is_quantized", False):
        return network
    settings = network.config.to_dict()
    settings.pop("quantization_config")
    with torch.device("meta"):
        empty = type(network)(type(network.config).from_dict(settings))
    empty.generation_config = network.generation_config
    return empty


def merged(weights: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """A base's weights with its low-rank adapters added, W + scaling * B A, in new tensors of the base's dtype.

    Merging in place and taking the adapters out again would round a bfloat16 base each time, and so change it.

    Args:
        weights: the state dict of a PEFT model, with `base_layer`, `lora_A` and `lora_B` of each adapted layer.
        scaling: alpha / rank.
    """
    plain = {}
    for name, value in weights.items():
        if ".lora_" in name:
            continue
        layer, _, part = name.rpartition(".base_layer.")
        down, up = (f"{layer}.lora_{side}.{ADAPTER}.weight" for side in "AB")
        if part == "weight" and down in weights:
            update = weights[up].float() @ weights[down].float()
            value = (value.float() + scaling * update).to(value.dtype)
        plain[name.removeprefix(BASE).replace(".base_layer.", ".")] = value
    return plain


# Brings the weights under training to the servers that sample from them, through a folder that both can read.


class WeightSync:
    """Writes the policy's weights to a folder that the servers which sample can read, and gives them to these."""

    def __init__(
        self,
        give: Callable[[Path, int], Sequence[str] | None],  # the weights' folder and step -> the servers that have them
        out: Path,  # the run's folder; the weights go to `out/served/`
        adapters: bool = False,  # low-rank adapters alone are sent, to servers that have the base
        dtype: torch.dtype = torch.float32,  # the servers' own: rounded here, half as many bytes are written and read
    ) -> None:
        self._give = give
        self._adapters = adapters
        self._dtype = dtype
        self.folder = out / SERVED
        self.places: Sequence[str] | None = None  # the servers that have the weights last sent, if they are known
        self._pushed: int | None = None

    def push(self, trainer: Any) -> float:
        """Bring the servers up to the trainer's step, unless they are; the seconds that it took."""
        started = time.perf_counter()
        step = trainer.state.global_step
        if self._pushed != step:
            self._write(trainer)
            trainer.accelerator.wait_for_everyone()  # every process has what was sampled by the weights before
            places: list[Sequence[str] | None] = [None]
            if trainer.accelerator.is_main_process:
                places = [self._give(self.folder, step)]
            broadcast_object_list(places)
            self.places = places[0]
            self._pushed = step
        return time.perf_counter() - started

    def _write(self, trainer: Any) -> None:
        """Write the policy's folder: its low-rank adapters alone, or all its weights."""
        network = trainer.accelerator.unwrap_model(trainer.model)
        if self._adapters:
            weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        else:
            network, weights = whole_weights(trainer)
        if not trainer.accelerator.is_main_process:
            return
        partial = self.folder.with_name(f"{SERVED}.partial")
        network.save_pretrained(partial, state_dict=rounded(weights, self._dtype))
        trainer.processing_class.save_pretrained(partial)
        shutil.rmtree(self.folder, ignore_errors=True)
        partial.rename(self.folder)


def rounded(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights with floating point numbers of no more bytes than `dtype`; names that share a tensor still do."""
    smaller: dict[tuple[int, torch.Size], Tensor] = {}
    plain = {}
    for name, value in weights.items():
        if value.is_floating_point() and value.element_size() > dtype.itemsize:
            shared = (value.data_ptr(), value.shape)
            if shared not in smaller:
                smaller[shared] = value.to(dtype)
            value = smaller[shared]
        plain[name] = value
    return plain
