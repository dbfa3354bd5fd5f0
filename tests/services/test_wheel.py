"""The wheel alone, in an environment that knows no checkout, run from an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.fakes import build_database
from tests.services.conftest import ROOT, SMALL, SMALL_DATA

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]
SOURCES = ("conf", "flows", "infra", "pipelines", "tasks", "pyproject.toml", "README.md", "LICENSE", ".gitignore")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built by pip from a copy of the sources with a tag, in which this machine's own settings lie, too."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__", "local")
            )
        else:
            shutil.copy(ROOT / name, folder / "source" / name)
    (folder / "source" / "conf" / "local").mkdir()
    (folder / "source" / "conf" / "local" / "endpoints.yaml").write_text("big: {}\n")
    git = "git -c user.name=n -c user.email=n@n"
    tag = f"git init --quiet && git add --all && {git} commit --quiet --message all && git tag v9.8.7"
    subprocess.run(tag, shell=True, cwd=folder / "source", check=True, timeout=60)
    return build(folder)


def build(folder):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), "."]
    done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, timeout=300, check=False)
    if done.returncode and "Could not find a version that satisfies the requirement setuptools" in done.stderr:
        pytest.skip("no package index can be reached for the build's own setuptools")
    assert done.returncode == 0, done.stderr
    return next(folder.glob("sqltrain-*.whl"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The Python of an environment with the wheel, and with the packages of this one but not its editable sqltrain."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    site = next((folder / "lib").glob("python*/site-packages"))
    # A folder that a .pth file adds is searched; its own .pth files, such as the editable install's, are not read.
    places = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages.pth").write_text("\n".join(places) + "\n")
    executable = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(executable), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--force-reinstall", str(wheel)], check=True, timeout=120)
    return executable


def run(python, folder, *words):
    command = [str(python.parent / "sqltrain"), *words]
    done = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_what_a_run_reads_and_nothing_of_this_machine(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = [*(ROOT / "conf").glob("*/**/*.*"), *(ROOT / "infra" / "deepspeed").glob("*.json")]
    wanted += [path for path in (ROOT / "pipelines").rglob("*.*") if path.suffix in (".css", ".js", ".txt", ".py")]
    shipped = {path.relative_to(ROOT).as_posix() for path in wanted if "local" not in path.parts and path.is_file()}
    assert len(shipped) > 200
    assert shipped - names == set()
    assert {"flows/py.typed", "tasks/py.typed", "pipelines/py.typed"} <= names
    assert not [name for name in names if name.startswith(("conf/local", "tests", "benchmarks"))]


def test_it_is_the_wheel_that_is_imported(python, tmp_path):
    code = "import flows, tasks, pipelines; print(flows.__file__, tasks.__file__, pipelines.__file__)"
    done = subprocess.run([str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(path.startswith(str(python.parent.parent)) for path in done.stdout.split())


def test_its_version_is_the_tag_and_a_copy_without_git_has_none(wheel, python, tmp_path):
    assert "sqltrain run miniature" in run(python, tmp_path, "--help")
    assert run(python, tmp_path, "--version") == "sqltrain 9.8.7\n"
    copied = shutil.ignore_patterns(".git", "build", "*.egg-info")
    shutil.copytree(wheel.parent / "source", tmp_path / "source", ignore=copied)
    assert build(tmp_path).name.startswith("sqltrain-0.0+unknown-")


def test_the_files_of_a_deployment_come_out_of_the_wheel(python, tmp_path):
    run(python, tmp_path, "init", ".")
    tracked = subprocess.run(["git", "ls-files", "infra"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {path for path in tracked.stdout.split() if not (tmp_path / path).is_file()} == set()


def test_another_programs_package_of_the_same_name_is_one_line(python, tmp_path):
    (tmp_path / "tasks.py").touch()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    command = [str(python.parent / "sqltrain"), "recipes"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    said = f"error: sqltrain's package 'tasks' is hidden by {tmp_path}/tasks.py. Look at PYTHONPATH"
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_recipes_are_listed_shown_and_checked(python, tmp_path):
    assert "sql_trail" in run(python, tmp_path, "recipes")
    assert "name: miniature" in run(python, tmp_path, "show", "miniature")
    run(python, tmp_path, "check", "miniature", *SMALL_DATA)


def test_predictions_are_scored(python, tmp_path):
    folder = tmp_path / "database" / "shop"
    folder.mkdir(parents=True)
    build_database(
        folder / "shop.sqlite",
        "CREATE TABLE item (name TEXT, price INTEGER)",
        "INSERT INTO item VALUES ('pen', 2), ('book', 9)",
    )
    (tmp_path / "gold.sql").write_text("SELECT name FROM item WHERE price > 3\tshop\nSELECT count(*) FROM item\tshop\n")
    (tmp_path / "pred.sql").write_text("SELECT name FROM item WHERE price = 9\nSELECT 7\n")
    words = ("score", "--gold", "gold.sql", "--pred", "pred.sql", "--database", "database", "--json")
    shown = json.loads(run(python, tmp_path, *words).splitlines()[-1])
    assert {name: shares["all"] for name, shares in shown["equalities"].items()}["bird"] == 50.0


def test_a_run_makes_the_stages_that_a_checkout_would_make(python, tmp_path):
    """The same keys: what a wheel has made, a checkout of the same version takes from the store."""
    run(python, tmp_path, "run", "miniature", "--until", "model", *SMALL)
    here = [sys.executable, "-m", "flows.cli", "stages", "miniature", *SMALL, f"--store={tmp_path / 'store'}", "--json"]
    done = subprocess.run(here, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    stages = json.loads(done.stdout.splitlines()[-1])["stages"]
    assert len(stages) == 15
    cached = [stage["name"] for stage in stages if stage["cached"]]
    assert cached == ["data", "synthesize", "filter", "gold_schema", "model"]
