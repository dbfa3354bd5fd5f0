"""The blocks of the pages, what becomes of each (tests/blocks.yaml), and the environments that pages ask for."""

import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
VERDICTS = ROOT / "tests" / "blocks.yaml"
COMMANDS = "docs/reference/commands.md"
HOME = "docs/index.md"  # it says what to install; a page that says nothing of its own takes that
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "infra/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)
WHOLE = re.compile(r"pip install [^\n`]*'\.\[([\w,-]+)\]'")  # an environment: sqltrain from a checkout
MORE = re.compile(r"pip install 'sqltrain\[([\w,-]+)\]'")  # an extra beside what is there
PACKAGES = ("conf", "flows", "infra", "pipelines", "tasks")


@dataclass(frozen=True)
class Block:
    """A command after a prompt, or a whole block of a shell, of Python or of settings."""

    page: str
    text: str
    file: str | None = None  # of a block with a title: the name of the file that it is

    @property
    def name(self) -> str:
        """Its first line, without a comment behind it; a line that goes on is whole."""
        line = self.text.replace("\\\n", " ").lstrip("\n").partition("\n")[0]
        return " ".join(re.sub(r"\s+# .*$", "", line).split())


def blocks(page: str) -> list[Block]:
    """What a reader may run or copy from a page, in its order. What commands print is left out."""
    found: list[Block] = []
    for words, text in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        language = words.partition(" ")[0]
        if language in ("", "console", "text"):
            found += [Block(page, command) for command in PROMPT.findall(text)]
        else:
            title = re.search(r'title="?([\w.]+)', words)
            found.append(Block(page, text, title[1] if title else None))
    return found


def verdicts(page: str) -> dict[str, str]:
    """What becomes of each block of a page, by its name: `run`, who runs it, or what it needs.

    A command of docs/reference/commands.md that another page shows, too, is that page's.
    """
    by_page = yaml.safe_load(VERDICTS.read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    if page == COMMANDS:
        for other in by_page:
            if other != page:
                found |= {name: f"as on {other}" for names in by_page[other].values() for name in names}
    for verdict, names in by_page.get(page, {}).items():
        found |= dict.fromkeys(names, verdict)
    return found


def extras(page: str) -> list[str]:
    """The extras of the environment that a page says to install; of several, the first runs its commands."""
    text = (ROOT / page).read_text(encoding="utf-8")
    environments = WHOLE.findall(text) or WHOLE.findall((ROOT / HOME).read_text(encoding="utf-8"))
    named = [environments[0], *MORE.findall(text)]
    return sorted({extra for names in named for extra in names.split(",")})


def needed(wanted: list[str]) -> set[str]:
    """The distributions that sqltrain needs with some extras, by pyproject.toml and what is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(text for name in wanted for text in project["optional-dependencies"][name])]
    waiting = [Requirement(text) for text in texts]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in metadata.distribution(name).requires or ():
                below = Requirement(text)
                if below.marker is None or below.marker.evaluate({"extra": extra}):
                    waiting.append(below)
    return {name for name, _ in seen}


def make_environment(folder: Path, wanted: list[str]) -> Path:
    """An environment with sqltrain and what these extras bring, as pip would make it, from packages that are here.

    Packages are linked and our own code is copied, so it takes seconds. Returns its folder of programs.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    site = next((folder / "lib").glob("python*/site-packages"))
    programs = {"sqltrain": "flows.cli:main"}
    for name in needed(wanted):
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).exists():  # packages of one namespace share a folder
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
        scripts = distribution.entry_points.select(group="console_scripts")
        programs |= {script.name: script.value for script in scripts}
    for name in PACKAGES:
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__", "local"))
    for name, place in programs.items():
        module, _, function = place.partition(":")
        program = folder / "bin" / name
        lines = [
            f"#!{folder / 'bin' / 'python'}",
            "import sys",
            f"from {module} import {function.partition('.')[0]}",
            # As pip writes it: worker processes import the program, and must not run it.
            "if __name__ == '__main__':",
            f"    sys.exit({function.partition(' ')[0]}())",
        ]
        program.write_text("\n".join(lines) + "\n")
        program.chmod(0o755)
    return folder / "bin"
