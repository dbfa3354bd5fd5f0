"""Causal language models with their tokenizers, from checkpoint folders and hub names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipelines.config import Model
from pipelines.errors import DataError, ResourceError


def load(path_or_name: str | Path, model: Model, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a checkpoint folder or a hub name.

    Args:
        dtype: of the weights; None takes `model.compute_dtype`, which is right where they only sample.

    Raises:
        DataError: there is no such folder or hub name, or it holds no whole causal language model with its tokenizer.
        ResourceError: `bfloat16` was asked for on a CUDA device that lacks it.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hide_bars()
    where, revision = str(path_or_name), None if Path(path_or_name).is_dir() else model.revision
    if model.compute_dtype == "bfloat16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise ResourceError("this CUDA device has no bfloat16", "Set model.compute_dtype=float32.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, revision=revision, padding_side="left")
        network = AutoModelForCausalLM.from_pretrained(
            where,
            revision=revision,
            dtype=dtype or getattr(torch, model.compute_dtype),
            attn_implementation="sdpa",
        )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"no model at {where}: {reason}", "Give a local folder or a hub name as model.source."
        ) from None
    if len(tokenizer) <= len(tokenizer.added_tokens_encoder):
        raise DataError(
            f"no tokenizer in {where}", "Copy tokenizer.json and tokenizer_config.json beside the model's weights."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return network, tokenizer


def hide_bars() -> None:
    """Keep transformers' loading bars out of the output: stages show their own progress."""
    from transformers.utils import logging

    logging.disable_progress_bar()
