"""The parts of docs/extending.md work as a stranger's own: as files beside a recipe, and as an installed package."""

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import recipes
from pipelines.data import base
from pipelines.errors import RecipeError
from pipelines.protocols.base import build
from pipelines.registry import REWARDS, Registry
from pipelines.stages import graph
from pipelines.store import Store
from pipelines.types import ActionKind

ROOT = Path(__file__).resolve().parent.parent
PARTS = dict(
    re.findall(r"```python title=(\S+)\n(.*?)```", (ROOT / "docs/extending.md").read_text(encoding="utf-8"), re.DOTALL)
)
RECIPE = """
include: [models/tiny, data/miniature, protocols/react]
plugins: [my_parts.py, my_reader.py, my_protocol.py]
protocol: {name: polite, options: {reasoning_tag: think}}
data:
  test: [{kind: csv, path: PATH, options: {database: shop.sqlite}}]
rewards:
  - {term: exec, weight: 5}
  - {term: short, weight: 0.5, options: {characters: 120}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stranger's folder: their parts, a database, questions, a recipe and a prompt."""
    tmp_path = tmp_path_factory.mktemp("stranger")
    for name, text in PARTS.items():
        (tmp_path / name).write_text(text)
    with sqlite3.connect(tmp_path / "shop.sqlite") as shop:
        shop.execute("CREATE TABLE item (name TEXT)")
    (tmp_path / "questions.csv").write_text("id,question,sql\n1,how many items,SELECT count(*) FROM item\n")
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("PATH", str(tmp_path / "questions.csv")))
    prompt = (ROOT / "conf/protocols/prompts/react_full.txt").read_text(encoding="utf-8")
    (tmp_path / "polite_full.txt").write_text(prompt)
    return tmp_path


def test_a_recipe_uses_the_reward_reader_and_protocol_of_its_plugins(folder: Path, tmp_path: Path) -> None:
    recipe = recipes.load(str(folder / "mine.yaml"))
    loaded = base.read(recipe.benchmark, 0, tmp_path / "stage")
    assert [example.gold_sql for example in loaded.examples] == ["SELECT count(*) FROM item"]
    polite = build(recipe.protocol)
    action = polite.parse("<think>hm</think>\n<sql>SELECT 1</sql>")
    assert action.kind is ActionKind.SQL
    assert polite.observe(action, None, 3).endswith("Please answer within 3 turns.")
    assert REWARDS["short"].__doc__ == "1 if the final SQL has at most that many characters."


def test_an_option_of_the_wrong_type_is_told_when_the_recipe_is_read(folder: Path) -> None:
    message = r"rewards.1.options: option 'characters' of reward term 'short': Input should be a valid integer"
    with pytest.raises(RecipeError, match=message):
        recipes.load(str(folder / "mine.yaml"), ["rewards.short.options.characters=many"])
    with pytest.raises(RecipeError, match=r"option 'database' of reader 'csv': Field required"):
        recipes.load(str(folder / "mine.yaml"), ["data.test.0.options={}"])


def test_a_change_of_a_plugins_code_changes_the_keys_of_the_stages_that_use_it_and_no_other(folder: Path) -> None:
    def keys() -> dict[str, str]:
        recipe = recipes.load(str(folder / "mine.yaml"), ["protocol.name=react"])
        return {step.name: step.key for step in graph.plan(recipe, Store(folder / "store"))}

    before = keys()
    (folder / "my_parts.py").write_text(PARTS["my_parts.py"].replace("<= characters", "< characters"))
    after = keys()
    (folder / "my_parts.py").write_text(PARTS["my_parts.py"])
    changed = {name for name in before if before[name] != after[name]}
    assert keys() == before
    assert changed == {"grpo", "evaluate_grpo", "report"}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", r"the plug-in .* cannot be imported: ZeroDivisionError: division by zero"),
        ("def f(:", r"cannot be imported: SyntaxError"),
        (
            "from pipelines.registry import reward\n@reward('exec')\ndef mine(outcome): return 1.0",
            r"reward term 'exec' is registered twice: by pipelines.rewards.terms and by sqltrain_plugin_",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_the_users_mistake(folder: Path, code: str, message: str) -> None:
    assert "exec" in REWARDS
    (folder / "broken.py").write_text(code)
    with pytest.raises(RecipeError, match=message):
        recipes.load("miniature", [f"plugins=[{folder / 'broken.py'}]"])


def test_a_plugin_that_is_missing_is_the_users_mistake(tmp_path: Path) -> None:
    for name in (tmp_path / "none.py", "no_such_module"):
        with pytest.raises(RecipeError, match=r"the plug-in .* cannot be imported"):
            recipes.load("miniature", [f"plugins=[{name}]"])


def test_an_installed_package_needs_no_line_in_a_recipe(folder: Path) -> None:
    """The package lies on the path with the metadata that pip writes; another process finds it."""
    package, facts = folder / "site" / "stranger", folder / "site" / "stranger-1.0.dist-info"
    for path in (package, facts):
        path.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "my_parts.py").write_text(PARTS["my_parts.py"])
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[sqltrain.rewards]\nmine = stranger.my_parts\n")
    script = (
        f"import sys; sys.path[:0] = [{str(folder / 'site')!r}, {str(ROOT)!r}]\n"
        "from pipelines import recipes\n"
        "from pipelines.registry import plugin_code\n"
        "recipe = recipes.load('miniature', ['rewards=[{term: exec}, {term: short, options: {characters: 9}}]'])\n"
        "print(recipe.rewards[1].options, list(plugin_code(recipe.slice('rewards'))))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "{'characters': 9} ['reward term short']\n", done.stderr


def test_a_registry_names_the_nearest_part() -> None:
    registry: Registry[object] = Registry("fruit", "sqltrain.fruits", "pipelines.errors", ())
    registry("apple")(object())
    with pytest.raises(RecipeError, match=r"there is no fruit 'aple'. Did you mean 'apple'\?"):
        registry["aple"]
    with pytest.raises(RecipeError, match=r"there is no fruit 'zzz'. There are: apple\."):
        registry["zzz"]
