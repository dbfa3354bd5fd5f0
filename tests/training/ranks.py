"""Runs training children as the ranks of one run: `python ranks.py` takes requests as JSON lines and answers each.

Importing TRL takes far longer than a tiny run, so one process imports it once and forks the ranks of each run. Every
rank is the real child, with the environment that torchrun would give it, and the ranks talk over gloo.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from pipelines.core.processes import free_port


def main():
    import torch

    from pipelines.training import child, grpo, sft  # noqa: F401  (both kinds are ready before the first request)

    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(child, **json.loads(line))), flush=True)


def run(child, plan, count, timeout_s, kill_at, signs):
    """The ranks' exit codes (None: still running after the time-out), and what each wrote.

    Args:
        kill_at: kill -9 all ranks when the first one has told this step.
        signs: signals that single ranks are sent when the first one has told its first step.
    """
    out = Path(plan).parent
    port = free_port()
    for old in out.glob("rank-*.out"):  # of a run that this one goes on from
        old.unlink()
    ranks = [fork(child, plan, rank, count, port, out) for rank in range(count)]
    codes = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < count and time.monotonic() < deadline:
        told = (out / "rank-0.out").read_text() if (out / "rank-0.out").exists() else ""
        if kill_at is not None and f'"step": {kill_at},' in told:
            break
        if signs and '"event": "step"' in told:
            for rank, name in signs.items():
                os.kill(ranks[int(rank)], signal.Signals[name])
            signs = {}
        codes |= {pid: os.waitstatus_to_exitcode(status) for pid, status in ended(ranks, codes)}
        time.sleep(0.01)
    hung = [pid for pid in ranks if pid not in codes]
    for pid in hung:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {
        "codes": [codes.get(pid) for pid in ranks],
        "out": [(out / f"rank-{rank}.out").read_text() for rank in range(count)],
        "err": [(out / f"rank-{rank}.err").read_text() for rank in range(count)],
    }


def ended(ranks, known):
    waited = [os.waitpid(pid, os.WNOHANG) for pid in ranks if pid not in known]
    return [(pid, status) for pid, status in waited if pid]


def fork(child, plan, rank, count, port, out):
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(out / f"rank-{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
        code = child.main([plan])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
