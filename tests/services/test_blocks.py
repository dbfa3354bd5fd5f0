"""The blocks of the pages run as they stand, each page in the environment that it says to install.

tests/blocks.yaml says what becomes of each block. A page's blocks run in its order, in a folder with what its reader
has by then: downloads of benchmarks, a shop, files of predictions, a small trained model, an endpoint.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import time

import pytest

from pipelines.core.processes import free_port
from tests import blocks
from tests.fakes import build_database, http_server, succeeded
from tests.services.conftest import SMALL_DATA

# By hand: `pytest -m slow tests/services/test_blocks.py`.
pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(3600)]
FIRST_RECIPE = "docs/tutorials/first-recipe.md"
QUESTIONS = {
    "How many ships are there?": "SELECT count(*) FROM ship",
    "Which ships sail under the flag NO?": "SELECT name FROM ship WHERE flag = 'NO'",
    "How many ships sail under each flag?": "SELECT flag, count(*) FROM ship GROUP BY flag",
    "Which ships have a number above the mean?": "SELECT name FROM ship WHERE id > (SELECT avg(id) FROM ship)",
    "Which ships of flag NO have a number above the mean, by name?": (
        "SELECT name FROM ship WHERE flag = 'NO' AND id > (SELECT avg(id) FROM ship) ORDER BY name"
    ),
}
PRODUCTS = ("How many products are there?", "SELECT count(*) FROM product")
TABLES = {
    "db_id": "harbour",
    "table_names": ["ship"],
    "table_names_original": ["ship"],
    "column_names": [[-1, "*"], [0, "id"], [0, "name"], [0, "flag"]],
    "column_names_original": [[-1, "*"], [0, "id"], [0, "name"], [0, "flag"]],
    "column_types": ["text", "number", "text", "text"],
    "primary_keys": [1],
    "foreign_keys": [],
}
# The miniature in seconds: nothing is learned, and there is a checkpoint with an evaluation.
RUN = [
    *SMALL_DATA,
    "model.tiny={width: 32, layers: 1, heads: 2, ffn: 64, context: 1024}",
    "stages=[data, synthesize, filter, sft, evaluate, report]",
    "evaluation={samples: 0, ks: [1], sampling: {turn_tokens: 16, episode_tokens: 1024}}",
    "rollout.processes=1",
    "hardware.processes=1",
]
ADDED = {"spider_dev": "spider", "spider_train": "spider", "spider_test": "spider", "spider_dk": "spider"}


def harbour(folder, name="harbour"):
    """A database in the layout of a benchmark."""
    path = folder / name / f"{name}.sqlite"
    path.parent.mkdir(parents=True)
    build_database(
        path,
        "CREATE TABLE ship (id INTEGER PRIMARY KEY, name TEXT, flag TEXT)",
        "INSERT INTO ship VALUES (1, 'Aurora', 'NO'), (2, 'Egret', 'LR'), (3, 'Fram', 'NO')",
    )
    return path


def asked_about(word):
    """The questions in other words, so that no training pool asks what is held out."""
    return [(question.replace("ship", word), sql) for question, sql in QUESTIONS.items()]


def bird_rows(questions):
    about = {"db_id": "harbour", "evidence": "", "difficulty": "simple"}
    return [
        {"question_id": number, "question": question, "SQL": sql, **about}
        for number, (question, sql) in enumerate(questions.items())
    ]


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def make_downloads(home):
    """Spider, BIRD, SynSQL and EHRSQL with one database and three questions, where the pages have them."""
    spider = home / "spider"
    harbour(spider / "database")
    harbour(spider / "database", "quay")
    for name, database, word in (
        *((name, "harbour", "ship") for name in ("dev", "test", "Spider-DK")),
        ("train", "quay", "boat"),
        ("train_spider", "quay", "boat"),
        ("train_others", "quay", "barge"),
    ):
        rows = [{"db_id": database, "question": question, "query": sql} for question, sql in asked_about(word)]
        write_json(spider / f"{name}.json", rows)
    write_json(spider / "tables.json", [TABLES])
    bird = home / "bird" / "dev"
    harbour(bird / "dev_databases")
    empty = {"Which ships sail under the flag SE?": "SELECT name FROM ship WHERE flag = 'SE'"}  # for `review` to doubt
    write_json(bird / "dev.json", bird_rows(QUESTIONS | empty))
    write_json(bird / "dev_tables.json", [TABLES])
    synsql = home / "synsql"
    harbour(synsql / "databases", "port")
    about = {"cot": "", "external_knowledge": "", "question_style": "Formal"}
    levels = ("Simple", "Moderate", "Complex", "Highly Complex")
    rows = [
        {"db_id": "port", "question": question, "sql": sql, "sql_complexity": level, **about}
        for (question, sql), level in zip(asked_about("vessel"), itertools.cycle(levels))
    ]
    write_json(synsql / "data.json", rows)
    own = [{"question": question, "database": "sales.sqlite", "sql": sql} for question, sql in QUESTIONS.items()]
    (home / "sales.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    shutil.copy(harbour(home / "copies"), home / "sales.sqlite")


def make_files(home, work):
    """What a reader has beside the downloads: gold SQL and predictions, questions, names that stand for a path."""
    links = {"SPIDER": "spider", "SYNSQL": "synsql", "BIRD": "bird/dev", "spider": "spider"}
    links |= {"database": "spider/database", "dev_databases": "bird/dev/dev_databases"}
    for name, target in links.items():
        (work / name).symlink_to(home / target)
    for name in ("benchmarks", "examples", "infra"):  # the pages are read in a checkout
        (work / name).symlink_to(blocks.ROOT / name)
    write_json(work / "dev.json", bird_rows(QUESTIONS))
    gold = "".join(f"{sql}\tharbour\n" for sql in QUESTIONS.values())
    predicted = "".join(f"{sql}\n" for sql in QUESTIONS.values())
    for name in ("dev_gold.sql", "dev.sql"):
        (work / name).write_text(gold)
    for name in ("mine.sql", "predicted.sql"):
        (work / name).write_text(predicted)
    by_number = {str(n): f"{sql}\t----- bird -----\tharbour" for n, sql in enumerate(QUESTIONS.values())}
    for name in ("predict_dev.json", "mine.json"):
        write_json(work / name, by_number)
    records = work / "dataset" / "ehrsql"
    harbour(records, "mimic_iii")
    rows = [
        {"id": str(n), "db_id": "mimic_iii", "question": question, "query": sql, "is_impossible": False}
        for n, (question, sql) in enumerate(QUESTIONS.items())
    ]
    write_json(records / "mimic_iii" / "valid.json", rows)
    write_json(work / "prediction.json", {row["id"]: row["query"] for row in rows})
    question, sql = PRODUCTS
    (work / "q.csv").write_text(f"question,sql\n{question},{sql}\n")
    row = {"question": question, "database": "shop.sqlite", "sql": "SELECT count(*) FROM product WHERE price < 0"}
    (work / "shop.jsonl").write_text(json.dumps(row) + "\n")  # it returns 0: nothing doubts it
    (work / "new").mkdir()
    (work / "new" / "monday.jsonl").write_text(json.dumps({**row, "sql": sql, "database": "../shop.sqlite"}) + "\n")


def say(asked):
    """What the endpoint answers: the SQL of the question that it is asked."""
    text = json.dumps(asked.json["messages"])
    known = {**QUESTIONS, PRODUCTS[0]: PRODUCTS[1]}
    sql = next((sql for question, sql in known.items() if question in text), "SELECT 1")
    message = {"role": "assistant", "content": f"<reasoning>I know.</reasoning>\n<solution>{sql}</solution>"}
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


@pytest.fixture(scope="session")
def environments(tmp_path_factory):
    """A function that makes the environment with some extras, once, and returns its folder of programs."""
    made = {}

    def make(extras):
        if tuple(extras) not in made:
            folder = tmp_path_factory.mktemp("environment") / "-".join(extras)
            made[tuple(extras)] = blocks.make_environment(folder, extras)
        return made[tuple(extras)]

    return make


def environment_of(programs, home):
    outside = {"PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "OMP_NUM_THREADS": "1"}
    quiet = {"DO_NOT_TRACK": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "GX_ANALYTICS_ENABLED": "false"}
    return outside | quiet | {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}


@pytest.fixture(scope="session")
def world(tmp_path_factory, environments):
    """The folders `home` and `work` of a reader, made once: each page finds them as they were made.

    A card names its database by its whole path, so the folders stay where they are and are put back from a copy.
    """
    folder = tmp_path_factory.mktemp("reader") / "reader"
    folder.mkdir()
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    make_downloads(home)
    make_files(home, work)
    variables = environment_of(environments(blocks.extras(blocks.HOME)), home)
    with http_server(say) as server:
        entry = f"{{base_url: '{server.url}/v1', model: m}}"
        (work / "conf" / "local").mkdir(parents=True)
        text = "".join(f"{name}: {entry}\n" for name in ("big", "other", "small", "agent"))
        (work / "conf" / "local" / "endpoints.yaml").write_text(text)

        def run(*words):
            succeeded(
                subprocess.run(
                    ["sqltrain", *words], cwd=work, env=variables, capture_output=True, text=True, timeout=3000
                )
            )

        run("connect", "--example")
        for name, place in ADDED.items():
            run("data", "add", name, str(home / place))
        run("data", "add", "bird_dev", str(home / "bird" / "dev"))
        for name in ("main", "change", "mine", "theirs"):
            gold = ("--gold", "dev_gold.sql", "--pred", "mine.sql", "--database", "database")
            run("score", *gold, "--equality", "strict,bird", "--report", f"scores/{name}")
        run("run", "miniature", *RUN)
        (checkpoint,) = work.glob("store/sft/*/model")
        (work / "CHECKPOINT").symlink_to(checkpoint.relative_to(work))
        (home / "checkpoint").symlink_to("../work" / checkpoint.relative_to(work))
        (work / "FILE.sqlite").symlink_to("shop.sqlite")
        (evaluation,) = work.glob("store/evaluate_sft/*")
        (work / "store" / "evaluate_sft" / "KEY").symlink_to(evaluation.name)
        (work / "store" / "evaluate_grpo").mkdir()
        (work / "store" / "evaluate_grpo" / "KEY").symlink_to(f"../evaluate_sft/{evaluation.name}")
        shutil.copytree(folder, folder.with_name("copy"), symlinks=True)
        yield folder


def run_block(block, work, variables):
    """Run a block to its end; its exit code and what it said."""
    if block.file is not None:
        (work / block.file).write_text(block.text)
        return 0, ""
    command = ["bash", "-e", "-c", block.text]
    if block.text.startswith(">>> "):
        (work / "session.txt").write_text(block.text)
        command = ["python", "-m", "doctest", "session.txt"]
    done = subprocess.run(
        command, cwd=work, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=3000, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def start_block(block, work, variables):
    """Start what serves until it is stopped: it must print an address, and stop when it is told to."""
    text = block.text.strip().partition("  #")[0] + f" --port {free_port()}"
    with (work / "said").open("w+") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {text}"], cwd=work, env=variables, stdout=file, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if "http://127.0.0.1" in (work / "said").read_text():
                break
            time.sleep(0.2)
        is_ready = process.poll() is None
        if is_ready:
            os.killpg(process.pid, signal.SIGINT)
        code = process.wait(120)
    said = (work / "said").read_text()
    return (0 if is_ready and code in (0, 130, -signal.SIGINT) else code or 1), said


def follow(page, wanted, world, environments):
    """Run the blocks of a page whose verdict is among those wanted; what each said."""
    shutil.rmtree(world)
    shutil.copytree(world.with_name("copy"), world, symlinks=True)
    home, work = world / "home", world / "work"
    variables = environment_of(environments(blocks.extras(page)), home)
    verdicts = blocks.verdicts(page)
    said, failed = [], []
    for block in blocks.blocks(page):
        verdict = verdicts[block.name]
        if verdict not in wanted:
            continue
        code, output = (start_block if verdict == "start" else run_block)(block, work, variables)
        said.append(output)
        if code != 0:
            failed.append(f"{block.name}\nexit code {code}\n{output[-2000:]}")
    assert not failed, f"{page}: " + "\n\n".join(failed)
    return said


def pages_with(*wanted):
    return [page for page in blocks.PAGES if set(wanted) & set(blocks.verdicts(page).values())]


@pytest.mark.parametrize("page", pages_with("run", "start"))
def test_the_blocks_of_a_page_run_as_they_stand(page, world, environments):
    said = follow(page, ("run", "start"), world, environments)
    if page == FIRST_RECIPE:  # "the data and the demonstrations do not depend on the number of epochs"
        lines = {line.split()[1]: line for line in said[-1].splitlines() if line.startswith("✓ ")}
        assert {stage for stage, line in lines.items() if "cached" not in line} == {"sft", "evaluate_sft", "report"}


@pytest.mark.parametrize("page", pages_with("run slowly"))
def test_the_blocks_of_a_page_that_train_run_as_they_stand(page, world, environments):
    follow(page, ("run", "start", "run slowly"), world, environments)


def test_an_environment_has_what_its_extras_bring_and_no_more(environments):
    """The home page once said `[serve]` alone, and `adapt` stopped at its first contract."""
    code = "import flows.cli, starlette, sys; print(flows.cli.__file__); import great_expectations"
    lines = {}
    for extras in (["serve"], ["ops", "serve"]):
        programs = environments(extras)
        done = subprocess.run([str(programs / "python"), "-c", code], cwd="/", capture_output=True, text=True)
        assert str(programs.parent) in done.stdout  # its own copy of sqltrain
        lines[tuple(extras)] = done.stderr
    assert "No module named 'great_expectations'" in lines["serve",]
    assert lines["ops", "serve"] == ""
