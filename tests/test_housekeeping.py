"""What a store must keep is kept: live runs, champions, pins and newest reports, with all that they were made of."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flows.commands import operate
from pipelines.core import claims
from pipelines.core.errors import DataError
from pipelines.core.removal import remove_folder
from pipelines.core.store import Store
from pipelines.nightly import store_gc
from pipelines.nightly.ledger import Ledger


def make(store, stage, key, inputs=None, base=None, **facts):
    def build(folder):
        (folder / "data.txt").write_text("x" * 1000)
        if base is not None:
            (folder / "reference.json").write_text(json.dumps({"source": str(base)}))

    store.make(stage, key, build, {"inputs": inputs or {}, **facts}, lambda: None)


def gone(store, days=0.0):
    return {str(one.folder.relative_to(store.root)) for one in store_gc.gc_candidates(store, days)}


@pytest.fixture
def store(tmp_path):
    """Two chains of a recipe, data -> sft -> report, of which the second is the newer."""
    made = Store(tmp_path / "store")
    for number in ("1", "2"):
        make(made, "data", f"d{number}")
        make(made, "sft", f"s{number}", {"data": f"d{number}"})
        make(made, "report", f"r{number}", {"sft": f"s{number}"}, recipe={"name": "farms"})
    for path in (made.folder("report", "r1") / "manifest.json", made.folder("report", "r1")):
        os.utime(path, (1, 1))
    return made


def test_the_newest_report_and_recent_stages_are_kept(store):
    assert gone(store) == {"data/d1", "sft/s1", "report/r1"}
    assert gone(store, days=1) == {"report/r1"}
    found = store_gc.usage_by_kind(store)
    assert {name: count for name, (count, _) in found.items()} == {"report": 2, "sft": 2, "data": 2}
    assert all(size > 2000 for _, size in found.values())


def test_a_pinned_report_keeps_its_chain_until_it_is_unpinned(store):
    assert store_gc.pin(store, "report/r1", True) == ("report", "r1")
    assert gone(store) == set()
    store_gc.pin(store, "report/r", False)
    assert gone(store) == {"data/d1", "sft/s1", "report/r1"}
    with pytest.raises(DataError, match="no stage 'report/x'"):
        store_gc.pin(store, "report/x", True)
    with pytest.raises(DataError, match="more than one stage"):
        store_gc.pin(store, "report/r", True)


def test_stages_that_are_pinned_at_once_are_all_kept_and_a_damaged_list_of_them_is_told(store):
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda name: store_gc.pin(store, "/".join(name), True), store.made()))
    assert store_gc.pins(store) == sorted(store.made())
    (store.root / "pins.json").write_text("[1]")
    with pytest.raises(DataError, match=r"pins\.json is damaged"):
        gone(store)


def test_a_pinned_evaluation_of_a_ready_policy_keeps_its_questions_and_links(store):
    for stage, key in (("test", "t1"), ("test_schema", "l1"), ("test", "t2")):
        make(store, stage, key)
    make(store, "evaluations", "e1", test="t1", test_schema="l1")
    make(store, "evaluations", "e2", test="t2", test_schema=None)
    store_gc.pin(store, "evaluations/e1", True)
    assert gone(store) & {"test/t1", "test_schema/l1", "test/t2"} == {"test/t2"}
    store_gc.pin(store, "evaluations/e2", True)
    assert "test/t2" not in gone(store)


def test_a_champion_and_its_predecessor_keep_theirs_and_older_ones_do_not(store):
    make(store, "grpo", "g0", {"data": "d0"})
    make(store, "grpo", "g1", {"sft": "s1"})
    make(store, "data", "u2", parts=[["data", "d1"], ["data", "dx"]])
    make(store, "data", "dx")
    make(store, "model", "m2", base=store.folder("grpo", "g1") / "model")
    make(store, "grpo", "g2", {"data": "u2", "model": "m2"})
    make(store, "evaluate_grpo", "e0", {"grpo": "g0"})
    make(store, "evaluate_grpo", "e2", {"grpo": "g2"})
    ledger = Ledger(store, "farms")
    for key in ("g0", "g1", "g2"):
        made = {"stage": "grpo", "key": key}
        ledger.add("night", decision="promoted", reason="", challenger=made, new=[], learned=[])
    assert gone(store) == {"grpo/g0", "evaluate_grpo/e0", "report/r1"}
    ledger.add("rollback", **{"from": "g2", "to": "g1"})
    assert gone(store) == {"grpo/g2", "evaluate_grpo/e2", "model/m2", "data/u2", "data/dx", "report/r1"}


def test_a_model_made_from_a_champion_keeps_its_weights(store):
    make(store, "grpo", "old", {"sft": "s1"})
    make(store, "model", "m", base=store.folder("grpo", "old") / "model")
    make(store, "report", "r3", {"model": "m", "sft": "s2"}, recipe={"name": "farms"})
    assert gone(store) == {"data/d1", "sft/s1", "report/r1", "report/r2"}  # the weights, not what they were made of


def test_a_run_keeps_what_it_claims_and_a_dead_one_nothing(store):
    code = (
        "import sys, time; from pathlib import Path; from pipelines.core.store import Store;"
        "from pipelines.core.claims import claimed\n"
        "with claimed(Store(Path(sys.argv[1])), [('sft', 's1')], {'recipe': 'farms'}):\n"
        "    print('on', flush=True); time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(store.root)], stdout=subprocess.PIPE)
    run.stdout.readline()
    (claim,) = claims.live_runs(store)
    assert (claim["recipe"], claim["pid"]) == ("farms", run.pid)
    assert gone(store) == {"report/r1"}
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    assert gone(store) == {"data/d1", "sft/s1", "report/r1"}
    assert claims.live_runs(store) == []


def test_looking_while_a_run_begins_does_not_take_its_claim(store):
    done = threading.Event()

    def look():
        while not done.is_set():
            claims.live_runs(store)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            with claims.claimed(store, [("sft", "s1")], {}):
                assert len(claims.live_runs(store)) == 1
    finally:
        done.set()
        looking.join()
    assert list((store.root / claims.RUNS).iterdir()) == []


def test_a_live_claim_that_cannot_be_read_stops_a_collection(store):
    """Nobody knows which stages that run needs; when it has ended, the claim is as dead as any other."""
    with claims.claimed(store, [("sft", "s1")], {}):
        (claim,) = (store.root / claims.RUNS).iterdir()
        with claim.open("r+") as file:
            file.truncate(7)
        with pytest.raises(DataError, match=r"cannot read .*: it is not JSON"):
            store_gc.gc_candidates(store, 0.0)
    assert claims.live_runs(store) == []


def test_a_work_folder_goes_when_nobody_works_in_it(store):
    work = store.work("sft", "new")
    work.mkdir()
    (work / "shard").write_text("half")
    os.utime(work, (time.time() - 10 * 86400,) * 2)
    assert "sft/.work-new" in gone(store, days=7)
    with claims.claimed(store, [("sft", "new")], {}):
        assert "sft/.work-new" not in gone(store, days=7)


def test_removing_leaves_no_half_and_the_rest_is_whole(store):
    assert all(went for _, went in store_gc.collect_garbage(store, store_gc.gc_candidates(store, 0.0)))
    assert {"/".join(name) for name in store.made()} == {"data/d2", "sft/s2", "report/r2"}
    assert all(store.damage(*name, whole=True) == [] for name in store.made())
    assert not list(store.root.glob("*/.gone-*"))


def test_gc_removes_the_remains_of_a_killed_gc(store):
    store.folder("sft", "s1").rename(store.root / "sft" / ".gone-s1")
    assert "sft/.gone-s1" in gone(store, days=7)
    make(store, "sft", "s1", {"data": "d1"})  # made again, and no longer needed again
    entries = store_gc.gc_candidates(store, 0.0)
    assert entries[0].folder.name == ".gone-s1"
    list(store_gc.collect_garbage(store, entries[1:]))  # though the remains are there still
    list(store_gc.collect_garbage(store, entries[:1]))
    assert not list(store.root.glob("*/.gone-*"))
    assert not store.has("sft", "s1")


def test_gc_leaves_what_is_needed_since_it_looked(store):
    """While folder after folder goes, a run claims a stage, one uses another, and one goes on in a work folder."""
    for key in ("used", "made"):
        make(store, "data", key)
    store.work("sft", "s3").mkdir()
    entries = store_gc.gc_candidates(store, 0.0)
    assert {entry.folder.name for entry in entries} == {"d1", "s1", "r1", "used", "made", ".work-s3"}
    collecting = store_gc.collect_garbage(store, entries)
    os.utime(store.folder("data", "used"))
    with (
        claims.claimed(store, [("sft", "s1")], {"recipe": "farms"}),  # and data/d1, which it was made of
        store.locked("sft", "s3", lambda: None),
    ):
        assert {entry.folder.name for entry, went in collecting if went} == {"r1", "made"}
    assert {"data/d1", "sft/s1", "data/used"} <= {"/".join(name) for name in store.made()}
    assert store.work("sft", "s3").is_dir()


def test_a_large_store_is_collected_with_few_manifests_read(store, monkeypatch):
    for number in range(100):
        make(store, "data", f"old{number}")
    looked_at = []
    read = Store.manifest
    monkeypatch.setattr(Store, "manifest", lambda store, *name: looked_at.append("/".join(name)) or read(store, *name))
    assert len(gone(store)) == 103
    assert sorted(looked_at) == ["data/d2", "report/r1", "report/r2", "report/r2", "sft/s2"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"stage": "report", "key": "r2", "inputs": null}'])
@pytest.mark.parametrize("name", ["report/r2", "sft/s2"])
def test_a_damaged_manifest_of_what_is_kept_keeps_all_finished_stages(store, name, content, capsys):
    """The newest report's or its model's: what it was made of cannot be read, and a work folder is needed by nobody."""
    (store.root / name / "manifest.json").write_text(content)
    store.work("sft", "new").mkdir()
    assert gone(store) == {"sft/.work-new"}
    operate.collect(str(store.root), 0.0, delete=True)
    lines = capsys.readouterr().out.splitlines()
    why = f"no finished stage goes: what {name} needs cannot be read. Remove that folder, or make it again"
    assert lines == [why, "removed sft/.work-new  0 B", "1 folders, 0 B"]
    assert f"perhaps needed by what is damaged: {name}" in store_gc.reasons_to_keep(store).values()
    assert len(list(store.made())) == 6
    remove_folder(store.root / name)
    assert "report/r1" in gone(store) or name == "report/r2"


def test_a_damaged_manifest_of_what_nobody_needs_keeps_nothing(store):
    for stage, key in (("sft", "s1"), ("data", "d1")):
        (store.folder(stage, key) / "manifest.json").write_text("{")
    assert gone(store) == {"data/d1", "sft/s1", "report/r1"}


def test_a_damaged_reference_of_a_model_keeps_the_weights_that_it_may_name(store):
    make(store, "grpo", "old", {"sft": "s1"})
    make(store, "model", "m", base=store.folder("grpo", "old") / "model")
    make(store, "report", "r3", {"model": "m"}, recipe={"name": "farms"})
    (store.folder("model", "m") / "reference.json").write_text("{")
    assert gone(store) == set()


def test_gc_leaves_what_a_stage_damaged_since_it_looked_may_need(store):
    entries = store_gc.gc_candidates(store, 0.0)
    store_gc.pin(store, "sft/s1", True)
    (store.folder("sft", "s1") / "manifest.json").write_text("{")
    assert not any(went for _, went in store_gc.collect_garbage(store, entries))


def test_the_leakage_stages_of_newest_reports_stay(store):
    """No stage is made of them, and their run would make them again."""
    make(store, "test", "t2")
    make(store, "report", "r3", {"sft": "s2", "data": "d2", "test": "t2"}, recipe={"name": "farms"})
    for number in ("1", "2"):
        make(store, "leakage", f"l{number}", {"data": f"d{number}", "test": "t2"})
    assert gone(store) == {"data/d1", "sft/s1", "report/r1", "report/r2", "leakage/l1"}
    assert store_gc.reasons_to_keep(store)["leakage", "l2"].startswith("newest report of farms")


def test_sizes_count_nested_files_and_not_what_links_lead_to(store, tmp_path):
    before = store_gc.size_of(store.folder("sft", "s1"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "large").write_bytes(bytes(10**6))
    (weights := store.folder("sft", "s1") / "model").mkdir()
    (weights / "weights").write_bytes(bytes(5000))
    (link := weights / "link").symlink_to(tmp_path / "elsewhere")
    assert store_gc.size_of(store.folder("sft", "s1")) == before + 5000 + link.lstat().st_size


def test_a_stage_that_was_used_lately_stays_however_old_it_is(store):
    """Made a month ago, used yesterday: gone after no day, and not after a week."""
    for name in ("d1", "d2"):
        for path in (store.folder("data", name) / "manifest.json", store.folder("data", name)):
            os.utime(path, (time.time() - 30 * 86400,) * 2)
    assert "data/d1" in gone(store, 7)
    os.utime(store.folder("data", "d1"))
    assert "data/d1" not in gone(store, 7)
    assert "data/d1" in gone(store, 0)
