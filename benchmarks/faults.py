"""What a run does when a part of it fails: the fault table of docs/faults.md, each row from a real `divopd train`.

A tiny student is trained on a counting environment; student and teacher are asked over HTTP (fake servers in processes
of their own). One row after another breaks a part of the run, waits until it goes on, and compares what is recorded
before and after. Exit status 1 when a row lost something recorded, left a process running, or did not go on.

    python benchmarks/faults.py --out docs/faults.md
    python benchmarks/faults.py --only explorer,sigterm
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fault_run import FaultRun, GaveUp  # noqa: E402

from divopd_trainer.records import rollout_to_dict  # noqa: E402

SETTLE_S = 1.0
DISK_BYTES = 96 << 20


@dataclass
class Row:
    """One line of the table."""

    name: str
    what: str
    seconds: float | None = None
    happened: str = ""
    left: list = field(default_factory=list)
    message: str = ""
    begun: float = 0.0
    lost: int = 0
    wrong: list = field(default_factory=list)


ROWS = {}


def fault(what):
    """A row of the table, produced by the function."""

    def add(do):
        ROWS[do.__name__] = (do, what)
        return do

    return add


@fault("kill -9 of an environment worker in the middle of episodes")
def env_worker(run, row):
    victim, when = run.workers()[0], time.time()
    os.kill(victim, signal.SIGKILL)
    row.seconds = run.until(lambda: run.begun_after(when), "an episode begun after the kill")
    run.until(lambda: len(run.workers()) == 4 and victim not in run.workers(), "the worker's successor")
    row.happened = (
        "the episode that it plays, if any, is lost; the others go on, and another worker takes its place"
    )
    row.left = run.survivors([victim])


@fault("an environment that never answers (time-out of an action: 3 s)")
def hanging_env(run, row):
    before, when = set(run.workers()), time.time()
    (run.folder / "hang").touch()
    row.seconds = run.until(lambda: run.begun_after(when), "an episode begun after the hang")
    run.until(lambda: before - set(run.workers()), "the end of the worker that hangs")
    run.until(lambda: len(run.workers()) == 4, "its successor")
    row.happened = "the worker is killed at the time-out and replaced; the other episodes never stop"
    row.left = run.survivors(before - set(run.workers()))


@fault("kill -9 of the explorer")
def explorer(run, row):
    victim, when = run.explorer(), time.time()
    family = [victim.pid, *(child.pid for child in victim.children(recursive=True))]
    victim.kill()
    row.seconds = run.until(lambda: run.begun_after(when), "an episode begun after the kill")
    row.happened = "it is started again with the newest weights and plays again what was in flight"
    row.left = run.survivors(family)


def _server(run, row, role, happened):
    server, when = run.servers[role], time.time()
    server.kill()
    time.sleep(1.0)
    server.start()
    back = time.time()
    run.until(lambda: run.begun_after(back), "an episode begun after the restart")
    row.seconds = time.time() - when
    row.happened = f"{happened} (it answered again after {back - when:.1f} s); no episode fails"


@fault("kill -9 of the student's server, started again after 1 s")
def student_server(run, row):
    _server(run, row, "student", "requests wait; the new server gets the current weights before it serves")


@fault("kill -9 of the teacher's server, started again after 1 s")
def teacher_server(run, row):
    _server(run, row, "teacher", "the rollouts that are being scored wait for the new server")


def _faulty(run, row, faults, happened):
    when = time.time()
    teacher = run.servers["teacher"]
    seen = len([a for a in teacher.answers() if a["fault"]])
    teacher.faults(faults)
    run.until(lambda: len([a for a in teacher.answers() if a["fault"]]) >= seen + len(faults), "the faults")
    hit = [a["t"] for a in teacher.answers() if a["fault"]]
    run.until(lambda: run.begun_after(max(hit)), "an episode begun after the faults")
    row.seconds = time.time() - (when if faults[0] == ["late", 10] else hit[seen])
    row.happened = happened


@fault("a teacher that answers NaN (2 answers)")
def teacher_nan(run, row):
    _faulty(run, row, ["nan"] * 2, "turns without a score are marked and never train; the run goes on")


@fault("a teacher that answers 429 (3 answers)")
def teacher_429(run, row):
    _faulty(run, row, [429] * 3, "asked again after a pause; every turn gets its score")


@fault("a teacher that answers 500 (3 answers)")
def teacher_500(run, row):
    _faulty(run, row, [500] * 3, "asked again after a pause; every turn gets its score")


@fault("a teacher whose JSON is cut short (3 answers)")
def teacher_truncated(run, row):
    _faulty(run, row, ["truncate"] * 3, "asked again; every turn gets its score")


@fault("a teacher that answers 10 s late (1 answer)")
def teacher_late(run, row):
    _faulty(run, row, [["late", 10]], "the answer is waited for; other episodes go on meanwhile")


@fault("SIGTERM to the learner, then resume")
def sigterm(run, row):
    begun = run.update
    run.process.send_signal(signal.SIGTERM)
    row.seconds = run.ended()
    row.left = run.survivors() + run.files_left()
    code = run.process.returncode
    _expect(row, code == 130, f"exit status {code} instead of 130")
    _expect(
        row,
        f"checkpoint-{run.update}" in _checkpoints(run),
        f"no checkpoint of update {run.update} ({begun})",
    )
    row.message = _last(run)
    row.happened = (
        f"the update is finished, a checkpoint written, exit status {code}; resumed: %.0f s to an update"
    )
    row.happened %= run.start()


@fault("kill -9 of the learner, then resume")
def learner(run, row):
    run.until(lambda: _checkpoints(run), "a checkpoint")
    run.process.kill()
    run.ended()
    begun = time.monotonic()
    row.left = run.survivors()
    ended = time.monotonic() - begun
    before = _tasks(run)
    row.seconds = run.start()
    row.left += run.files_left()
    run.until(lambda: before <= _tasks(run), "every task that was recorded before")
    row.happened = (
        f"explorer and workers are gone {ended:.1f} s later; resumed from the last checkpoint, turns after it are "
        "played again"
    )


@fault("a full disk, then room again and resume")
def full_disk(run, row):
    ballast = run.dir.parent / "ballast"
    file = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(file, bytes(4096)):
            pass
    os.close(file)
    row.seconds = run.ended()
    row.left = run.survivors() + run.files_left()
    code = run.process.returncode
    row.message = "divopd train cannot" + _last(run).partition("divopd train cannot")[2]
    _expect(row, code not in (0, None), f"exit status {code}")
    ballast.unlink()
    before = _tasks(run)
    row.happened = (
        f"the run ends with status {code}; there is no room for a checkpoint; with room again it is resumed from the "
        f"last one ({run.start():.0f} s to an update), turns after it are played again"
    )
    run.until(lambda: before <= _tasks(run), "every task that was recorded before")


def _expect(row, condition, otherwise):
    if not condition:
        row.wrong.append(otherwise)


def _checkpoints(run):
    return [path.parent.name for path in (run.dir / "checkpoints").glob("checkpoint-*/manifest.json")]


def _tasks(run):
    return {(rollout.task, rollout.attempt) for rollout in run.rollouts().values()}


def _last(run):
    return " ".join(line.strip() for line in run.said())


def snapshot(run):
    return {number: rollout_to_dict(rollout) for number, rollout in run.rollouts().items()}


def produce(run, name):
    """One row: break something, see the run go on, compare what is recorded."""
    do, what = ROWS[name]
    row = Row(name, what)
    if run.process is None or run.process.poll() is not None:
        run.start()
    run.until(lambda: len(run.workers()) == 4, "four environment workers")
    run.said()
    counters = run.counters()
    before, trained, dead = snapshot(run), run.trained(), run.dead_turns()
    row.begun = time.time()
    try:
        do(run, row)
        if not row.message:
            run.wait_for_counters()
            row.message = "; ".join([*dict.fromkeys(run.said()), *run.counted(counters)])
        time.sleep(SETTLE_S)
    except GaveUp as error:
        row.wrong.append(str(error))
    row.lost = max(0, run.dead_turns() - dead)
    compare(run, row, before, trained)
    return row


def compare(run, row, before, trained):
    """Nothing that was recorded may be gone or changed, nothing may train twice, no task may be lost."""
    after, now = snapshot(run), run.trained()
    # What was recorded beyond the checkpoint is played again, in another order; it stays in the file, marked.
    again = row.name in ("learner", "full_disk")
    gone = [n for n in before if n not in after or (after[n] != before[n] and not again)]
    _expect(row, not gone, f"recorded rollouts are gone or changed: {gone[:5]}")
    _expect(row, sorted(after) == list(range(len(after))), "the numbers of the rollouts have holes")
    _expect(row, len(set(now)) == len(now), "a turn was trained twice")
    _expect(row, again or now[: len(trained)] == trained, "batches that were recorded are gone")
    tasks = [(r["task"], r["attempt"], r["meta"].get("epoch")) for r in after.values()]
    _expect(row, len(set(tasks)) == len(tasks), "a task was recorded twice")
    if row.left:
        row.wrong.append(f"left running: {row.left}")


def table(rows):
    """The text of docs/faults.md."""
    lines = [
        "# Faults",
        "",
        "What a run does when a part of it fails. Written by `python benchmarks/faults.py --out docs/faults.md`, which "
        "breaks a real",
        "`divopd train`: a tiny student on a counting environment, 4 environment workers, 5 turns an episode, 8 turns a "
        "batch, student",
        "and teacher behind (fake) vLLM servers, on a CPU. Seconds are from the fault to the first recorded episode that "
        "began after it;",
        "for SIGTERM and a full disk to the end of the run, for a killed learner from the resume to its first update "
        "(most of it",
        "imports). Turns lost are those that the student wrote and that are not recorded, or recorded without their "
        "score. In every",
        "row all rollouts recorded before are read back unchanged afterwards (those beyond the checkpoint that is resumed are "
        "played again:",
        "their tasks are all recorded), no turn trains twice, and no task is recorded twice. Left out of the message: "
        "its times.",
        "",
        "| Fault | What happened | Seconds | Turns lost | Left running | Message |",
        "|---|---|---:|---:|---|---|",
    ]
    for row in rows:
        seconds = "-" if row.seconds is None else f"{row.seconds:.1f}"
        left = ", ".join(map(str, row.left)) or "none"
        message = re.sub(r"\s+", " ", row.message).replace("|", "/") or "none"
        message = re.sub(r"/\S*/(?=[^/\s]+)", "", message)
        message = re.sub(r"\[\d\d:\d\d\] ", "", message)
        wrong = f" **{'; '.join(row.wrong)}**" if row.wrong else ""
        lines.append(
            f"| {row.what} | {row.happened}{wrong} | {seconds} | {row.lost} | {left} | {message[:520]} |"
        )
    return "\n".join(lines) + "\n"


def make_model(folder):
    from divopd_trainer.tiny import TinySpec, build_model, save_model, train_tokenizer

    # The servers sample from 300 ids.
    words = " ".join(f"word{a}{b}" for a in "abcdefghij" for b in "abcdefghij")
    tokenizer = train_tokenizer([words] * 3, vocab_size=340)
    spec = TinySpec(layers=1, width=32, heads=2, mlp=48, positions=2048)
    save_model(build_model(spec, tokenizer), tokenizer, folder)


def mount(folder):
    """A file system of its own for the run directory, so that it can be full; False where that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True).returncode == 0
    return False


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(ROWS)
    parser.add_argument("--only", default=",".join(names), help=f"rows, of {', '.join(names)}")
    parser.add_argument("--out", help="file for the table")
    args = parser.parse_args(argv)
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(names):
        parser.error(f"unknown rows {sorted(unknown)}; choose from {', '.join(names)}")
    folder = Path(tempfile.mkdtemp(prefix="divopd-faults-"))
    disk, rows = folder / "disk", []
    small = mount(disk)
    run = FaultRun(folder, disk / "run")
    try:
        make_model(folder / "model")
        run.settings(folder / "model")
        for server in run.servers.values():
            server.start()
        for name in ROWS:
            if name not in wanted:
                continue
            if name == "full_disk" and not small:
                print("full_disk: left out, a file system for the run directory may not be mounted here")
                continue
            begun = time.monotonic()
            rows.append(produce(run, name))
            row = rows[-1]
            print(f"{row.name}: {row.seconds and round(row.seconds, 1)} s; {row.happened}; {row.message[:300]}"
                  f" ({time.monotonic() - begun:.0f} s) {row.wrong or ''}", flush=True)  # fmt: skip
        lost = run.lost_turns()
        # An episode that a fault ends was in flight before it; the row before had settled by then.
        begun = [row.begun - SETTLE_S for row in rows] + [time.time() - SETTLE_S]
        for row, since, until in zip(rows, begun, begun[1:]):
            row.lost += sum(since < t <= until for t in lost)
    finally:
        run.end()
        if small:
            subprocess.run(["umount", str(disk)], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
    text = table(rows)
    if args.out:
        Path(args.out).write_text(text)
    print(text)
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
