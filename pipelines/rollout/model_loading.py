"""Causal language models with their tokenizers, from checkpoint folders and hub names."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from pipelines.core.errors import ResourceError
from pipelines.recipe.config import Model
from pipelines.rollout.checkpoint_files import network_of, require_rows, tokenizer_of


def load(
    path_or_name: str | Path, model: Model, dtype: torch.dtype | None = None, quantized: bool = False
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a checkpoint folder or a hub name.

    Args:
        dtype: dtype of the weights; None takes `model.compute_dtype`, which is right for weights that only sample.
        quantized: holds the matrices of all linear layers but the head in NF4, on the device of this process.
    """
    from transformers.utils.hub import cached_file

    hide_bars()
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans for each new shape, and here most are new
    name = str(path_or_name)
    revision = model.revision
    if Path(path_or_name).is_dir():
        revision = None
    dtype = dtype or getattr(torch, model.compute_dtype)
    if model.compute_dtype == "bfloat16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise ResourceError("this CUDA device has no bfloat16", "Set model.compute_dtype=float32.")
    options: dict[str, Any] = {}
    if quantized:
        options = _nf4_options(dtype)
    tokenizer = tokenizer_of(name, revision=revision, padding_side="left")
    network = network_of(name, revision=revision, dtype=dtype, attn_implementation="sdpa", **options)
    if quantized:
        for layer in network.modules():
            if hasattr(layer, "support_avx512bf16_for_cpu"):
                layer.support_avx512bf16_for_cpu = False  # such a layer samples with coarser scales than it trains with
    if revision is not None:  # TRL reads a reference network by this name, and would take the newest commit
        file = cached_file(name, "config.json", revision=revision, local_files_only=True)
        network.config._name_or_path = str(Path(file).parent)
    require_rows(name, network, tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return network, tokenizer


def _nf4_options(dtype: torch.dtype) -> dict[str, Any]:
    """Options of loading weights in NF4, the scale of each 64 of them in 8 bits (QLoRA, section 3)."""
    from transformers import BitsAndBytesConfig

    require_bitsandbytes()
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    device = "cpu"
    if torch.cuda.is_available():
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = f"cuda:{rank}"
    return {"quantization_config": quantization, "device_map": {"": device}}


def require_bitsandbytes() -> None:
    """Raises ResourceError if bitsandbytes, which holds weights in 4 bits, is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ResourceError("model.lora.bits=4 needs bitsandbytes", "pip install 'sqltrain[qlora]'")


def hide_bars() -> None:
    """Keep transformers' loading bars out of the output: stages show their own progress."""
    from transformers.utils import logging

    logging.disable_progress_bar()
