"""What a step of Muon takes on this processor: by PyTorch alone, and with products that are rounded.

    python benchmarks/muon.py

PyTorch multiplies bfloat16 matrices number by number where the processor has no instructions for them. The training
then takes products in float32 and rounds them (`pipelines.training.muon.orthogonal`). One thread, the matrices of
the miniature's blocks; processor seconds of their products in a step, the least of several.
"""

import argparse
import time

import torch

from pipelines.training.muon import orthogonal, slow_bfloat16

LAYERS = 4
SHAPES = ((128, 128), (128, 128), (128, 128), (128, 128), (384, 128), (384, 128), (128, 384))  # of each block


def seconds(rounded: bool, steps: int) -> float:
    """Processor seconds of the fastest of some steps."""
    torch.manual_seed(0)
    updates = [torch.randn(SHAPES.count(shape) * LAYERS, *shape) for shape in dict.fromkeys(SHAPES)]
    taken = []
    for _ in range(steps):
        before = time.process_time()
        for alike in updates:
            orthogonal(alike, (3.4445, -4.775, 2.0315), 5, 1e-7, rounded)
        taken.append(time.process_time() - before)
    return min(taken)


def main() -> None:
    """Print both, and which of them training takes here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    plain, rounded = seconds(False, steps), seconds(True, steps)
    chosen = "rounded products" if slow_bfloat16(torch.device("cpu")) else "PyTorch alone"
    print(f"PyTorch alone     {plain:8.4f} s a step")
    print(f"rounded products  {rounded:8.4f} s a step, {plain / rounded:.1f} times as fast")
    print(f"training takes: {chosen}")


if __name__ == "__main__":
    main()
