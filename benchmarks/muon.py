"""What a step of Muon takes on this processor: by PyTorch alone, and with products that are rounded.

    python benchmarks/muon.py

PyTorch multiplies bfloat16 matrices number by number where the processor has no instructions for them. The training
then takes products in float32 and rounds them (`pipelines.training.trainer.RoundedProducts`). One thread, the matrices
of the miniature's blocks; processor seconds of a step, the least of several.
"""

import argparse
import contextlib
import time

import torch
from torch import nn

from pipelines.training.trainer import RoundedProducts, rounded_products

LAYERS = 4
SHAPES = ((128, 128), (128, 128), (128, 128), (128, 128), (384, 128), (384, 128), (128, 384))  # of each block


def seconds(rounded: bool, steps: int) -> float:
    """Processor seconds of the fastest of some steps."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(shape)) for _ in range(LAYERS) for shape in SHAPES]
    for weight in weights:
        weight.grad = torch.randn(weight.shape)
    optimizer = torch.optim.Muon(weights, lr=0.02)
    taken = []
    for _ in range(steps):
        before = time.process_time()
        with RoundedProducts() if rounded else contextlib.nullcontext():
            optimizer.step()  # type: ignore[no-untyped-call]
        taken.append(time.process_time() - before)
    return min(taken)


def main() -> None:
    """Print both, and which of them training takes here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    plain, rounded = seconds(False, steps), seconds(True, steps)
    chosen = "rounded products" if isinstance(rounded_products(), RoundedProducts) else "PyTorch alone"
    print(f"PyTorch alone     {plain:8.4f} s a step")
    print(f"rounded products  {rounded:8.4f} s a step, {plain / rounded:.1f} times as fast")
    print(f"training takes: {chosen}")


if __name__ == "__main__":
    main()
