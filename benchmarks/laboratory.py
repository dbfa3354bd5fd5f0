"""The papers' claims, tested in miniature: the arms of every claim on three seeds, and the page of what came out.

    python benchmarks/laboratory.py --store store/learning            # all claims, the most decisive ones first
    python benchmarks/laboratory.py turn_reward coupling --plan       # what would be made, and about how long it takes
    python benchmarks/laboratory.py --page                            # docs/results/laboratory.md from what is there

Each claim is a file of conf/tables/claims, and runs as `sqltrain sweep claims/NAME`. What is finished is taken from the
store, so the same command goes on where a killed one ended; claims share what they have in common. The page is built
anew after each claim. Give the store of benchmarks/learning.py: its runs of the miniature are arms of two claims.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.sweeps import paper_tables

PAGE = Path(__file__).resolve().parent.parent / "docs" / "build_laboratory.py"
# By what a claim costs once those before it are there, and by how likely its arms decide it.
ORDER = (
    "diversity",
    "ranking",
    "turn_reward",
    "grpo_filter",
    "multi_turn",
    "unknown_schema",
    "coupling",
    "sft_then_rl",
    "propose",
    "dual_track",
    "six_rewards",
)


def sweep(name: str, store: Path, words: Sequence[str], plan: bool) -> int:
    """Make the cells of one claim, or say which are to be made; the command's exit status."""
    command = [sys.executable, "-m", "flows.cli", "sweep", f"claims/{name}", *words, f"--store={store}"]
    return subprocess.run([*command, "--plan"] if plan else command, check=False).returncode


def build(store: Path, words: Sequence[str]) -> None:
    """Write docs/results/laboratory.md from what the store has."""
    subprocess.run([sys.executable, str(PAGE), str(store), *words], check=True)


def main() -> None:
    """Run the claims that are named, or all that this world can show, and build the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ORDER), help="of claims, or overrides such as seed=7..9")
    parser.add_argument("--store", type=Path, default=Path("store/learning"))
    parser.add_argument("--plan", action="store_true", help="only say what would be made")
    parser.add_argument("--page", action="store_true", help="only build the page")
    options = parser.parse_intermixed_args()
    words = [name for name in options.names if "=" in name]
    names = [name for name in options.names if "=" not in name] or list(ORDER)
    failed = []
    for name in () if options.page else names:
        claim = paper_tables.load_table(f"claims/{name}").claim
        print(f"claim {claim.number if claim else '?'}: {name}", flush=True)
        failed += [name] if sweep(name, options.store, words, options.plan) else []
        if not options.plan:
            build(options.store, words)
    if options.page:
        build(options.store, words)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the same command goes on")


if __name__ == "__main__":
    main()
