"""Does a model learn one's own database? The example shop, its 192 questions, and 40 in a person's words.

    python benchmarks/adapt.py --store build/adapt
    python benchmarks/adapt.py --store build/adapt --model tiny --model smollm2 --model CHECKPOINT

For each model (tiny: the tiny model from scratch; else a name of conf/models, a folder, a GGUF file or a hub name) it
connects the example (`sqltrain connect --example`), takes the sampled values out of its card (most of a prompt of the
tiny model) and runs `sqltrain adapt shop --questions questions.csv`. The questions are cut by what they ask: no
held-out query, whatever its values, is trained on. Then the checkpoints before and after answer the 40 questions of
conf/example/people.csv, which share no phrase with the templates that were trained on.

It prints EX on the held-out questions and on a person's, before and after training, with intervals, and the time. What
is finished is taken from the store.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PEOPLE = Path(__file__).resolve().parents[1] / "conf" / "example" / "people.csv"
TINY = "tiny"
GREEDY = ("evaluation.samples=0", "evaluation.ks=[1]")


@dataclass(frozen=True)
class Shop:
    """A working folder with the example database, for the adaptation of one model."""

    folder: Path

    def sqltrain(self, *words: str) -> str:
        """Run a command in the folder, and print and return what it says."""
        command = [sys.executable, "-m", "flows.cli", *words]
        done = subprocess.run(command, cwd=self.folder, check=True, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        return done.stdout

    def last_json(self, *words: str) -> Any:
        """The JSON object on the last line of a command."""
        return json.loads(self.sqltrain(*words, "--json").splitlines()[-1])

    def connect(self) -> None:
        """Write the example and its card, without example values and with the hidden column of the tutorial."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sqltrain("connect", "--example")
        card = self.folder / "databases" / "shop.yaml"
        shop = yaml.safe_load(card.read_text(encoding="utf-8"))
        for table in shop["tables"].values():
            for column in table["columns"].values():
                column.pop("values", None)
        shop["tables"]["customer"]["columns"]["email"]["hidden"] = True
        card.write_text(yaml.safe_dump(shop, sort_keys=False), encoding="utf-8")
        shutil.copy(PEOPLE, self.folder / PEOPLE.name)

    def adapt(self, model: str, overrides: list[str]) -> dict[str, Any]:
        """Train the model on the questions; the decision, with its figures."""
        choice = [] if model == TINY else ["--model", model]
        words = ["adapt", "shop", *overrides, "--store", "store", "--questions", "questions.csv", *choice]
        decision: dict[str, Any] = self.last_json(*words)
        return decision

    def ask_people(self, checkpoint: str) -> dict[str, float]:
        """The figures of a checkpoint on a person's questions, greedy."""
        source = ["--questions", PEOPLE.name, "--database", "shop", "--store", "store"]
        stages = self.last_json("evaluate", "recipes/shop.yaml", "--model", checkpoint, *GREEDY, *source)["stages"]
        (evaluated,) = (stage["metrics"] for name, stage in stages.items() if name.startswith("evaluate"))
        figures: dict[str, float] = evaluated
        return figures


def percent(value: float) -> str:
    """A share in percent with one decimal."""
    return f"{100 * value:.1f}"


def main() -> None:
    """Adapt each model, ask it a person's questions, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("store/adapt"), help="a folder for each model's work")
    parser.add_argument("--model", action="append", help="a model to adapt, repeatable; tiny (default): from scratch")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the recipe, such as seed=1 or grpo.steps=40")
    options = parser.parse_intermixed_args()
    held_out = [
        "| model | held-out questions | EX before | EX after | difference | McNemar p | minutes |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    people = ["| model | checkpoint | a person's questions | EX greedy |", "|---|---|---:|---:|"]
    for number, model in enumerate(options.model or [TINY]):
        path = Path(model).expanduser()
        source = str(path.resolve()) if path.exists() else model
        shop = Shop(options.store.resolve() / f"{number}_{path.name}")
        shop.connect()
        started = time.perf_counter()
        decision = shop.adapt(source, options.overrides)
        minutes = (time.perf_counter() - started) / 60
        numbers = decision["numbers"]
        before = percent(numbers["champion_ex"])
        after = percent(numbers["challenger_ex"])
        interval = f"[{percent(numbers['low'])}, {percent(numbers['high'])}]"
        difference = f"{percent(numbers['difference'])} {interval}"
        row = (path.name, f"{numbers['questions']:.0f}", before, after, difference, f"{numbers['p_mcnemar']:.2g}")
        held_out.append(f"| {' | '.join(row)} | {minutes:.1f} |")
        trained = decision["challenger"]
        checkpoints = {"after": f"store/{trained['stage']}/{trained['key']}/model"}
        if model != TINY:  # whose random weights answer nothing
            checkpoints = {"before": source, **checkpoints}
        for when, checkpoint in checkpoints.items():
            figures = shop.ask_people(checkpoint)
            ex = f"{percent(figures['ex'])} [{percent(figures['ex_low'])}, {percent(figures['ex_high'])}]"
            people.append(f"| {path.name} | {when} | {figures['n_questions']:.0f} | {ex} |")
    print("\n" + "\n".join(held_out))
    print("\n" + "\n".join(people))


if __name__ == "__main__":
    main()
