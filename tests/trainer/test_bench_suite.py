"""The benchmark suite: a runner that keeps what it has and leaves nothing running, and commands that fit the scripts."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import suite  # noqa: E402
import suite_tables as tables  # noqa: E402
from suite_run import Part, Suite, read_object  # noqa: E402

DEADLINE_S = 120
FACTS = {
    "date": "2026-01-02 03:04 UTC", "scale": 1.0, "load_average": [0.1, 0.1, 0.1],
    "machine": {"cpu": "Some CPU", "cores": 2, "memory_gb": 8.0, "system": "Linux x86_64"},
    "versions": {"python": "3.11.1", "torch": None},
}  # fmt: skip
# A part that starts a child which leaves its group, says so, and waits.
HANG = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def script(folder, name, code):
    path = folder / f"{name}.py"
    path.write_text(code)
    return path


def fake(folder, name, code, *words, deadline_s=DEADLINE_S, table=lambda result: f"value {result['value']}"):
    words = [str(word) for word in (script(folder, name, code), *words)]
    return Part(name, name.title(), f"About {name}.", words, deadline_s, table)


def good(folder, name="good", value=7):
    return fake(folder, name, f"print('a line before'); print('{{\"value\": {value}}}')")


def until(true):
    end = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def a_suite(folder, **options):
    return Suite(folder, FACTS, say=lambda line: None, **options)


# --- the runner -------------------------------------------------------------------------------------------------------


def test_a_part_that_fails_does_not_stop_the_others_and_its_last_words_are_kept(tmp_path):
    failing = fake(
        tmp_path, "bad", "import sys; print('{}'); print('first', file=sys.stderr); sys.exit('no room')"
    )
    runner = a_suite(tmp_path / "out")
    assert runner.run([failing, good(tmp_path)]) == ["bad"]
    report = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert report["finished"] and report["machine"]["cpu"] == "Some CPU"
    bad, done = report["parts"]["bad"], report["parts"]["good"]
    assert bad["status"] == "failed" and bad["why"] == "exit status 1: no room"
    assert done["status"] == "done" and done["result"] == {"value": 7} and done["seconds"] >= 0


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('no object here')", "expected one JSON object"),
        ("print('{\"value\": 1')", "expected one JSON object"),
        ("print('{\"value\": 1} {}')", "expected one JSON object"),
        ("print('{\"other\": 1}')", "KeyError: 'value'"),
        ("print('[1]')", "expected one JSON object"),
    ],
)
def test_what_cannot_be_put_into_a_table_is_a_failure(tmp_path, code, says):
    runner = a_suite(tmp_path / "out")
    assert runner.run([fake(tmp_path, "bad", code)]) == ["bad"]
    record = runner.report["parts"]["bad"]
    assert says in record["why"] and "result" not in record


def test_a_part_past_its_deadline_ends_with_all_that_it_started(tmp_path):
    hanging = fake(tmp_path, "hang", HANG, tmp_path / "pid", deadline_s=6)
    runner, began = a_suite(tmp_path / "out"), time.monotonic()
    assert runner.run([hanging, good(tmp_path)]) == ["hang"]
    assert time.monotonic() - began < DEADLINE_S
    assert "not done after 6 s" in runner.report["parts"]["hang"]["why"]
    assert runner.report["parts"]["good"]["status"] == "done"
    until(lambda: not alive(int((tmp_path / "pid").read_text())))


def test_when_the_time_for_all_is_used_up_the_rest_is_not_begun_and_counts_as_failed(tmp_path):
    touching = fake(tmp_path, "late", f"open({str(tmp_path / 'ran')!r}, 'w')")
    runner = a_suite(tmp_path / "out")
    assert runner.run([touching], at_most_s=0) == ["late"]
    assert "not begun" in runner.report["parts"]["late"]["why"] and not (tmp_path / "ran").exists()


def test_a_part_may_say_why_it_is_left_out_and_that_is_no_failure(tmp_path):
    runner = a_suite(tmp_path / "out")
    assert runner.run([fake(tmp_path, "none", 'print(\'{"left_out": "no data"}\')')]) == []
    record = runner.report["parts"]["none"]
    assert record["status"] == "left out" and record["why"] == "no data"


def test_folders_of_this_machine_are_not_recorded(tmp_path):
    secret = tmp_path / "secret" / "games"
    code = "import sys; sys.exit('cannot read ' + sys.argv[1])"
    runner = a_suite(tmp_path / "out", hidden={str(secret): "GAMES"})
    runner.run([fake(tmp_path, "bad", code, secret)])
    text = (tmp_path / "out" / "bench.json").read_text()
    assert "cannot read GAMES" in text and "secret" not in text


def test_keep_adds_to_what_is_there_and_without_it_nothing_is_left(tmp_path):
    a_suite(tmp_path / "out").run([good(tmp_path, "one", 1)])
    runner = a_suite(tmp_path / "out", keep=True)
    runner.run([good(tmp_path, "two", 2)])
    assert {name: part["result"]["value"] for name, part in runner.report["parts"].items()} == {
        "one": 1,
        "two": 2,
    }
    runner = a_suite(tmp_path / "out")
    runner.run([good(tmp_path, "two", 3)])
    assert list(runner.report["parts"]) == ["two"]


DRIVER = """
import json, sys
sys.path.append(sys.argv[1])
import suite
made = [suite.Part(name, name, "", words, 120, str) for name, words in json.loads(sys.argv[2])]
suite.parts = lambda *a: made
sys.exit(suite.main(["--out", sys.argv[3]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_suite_keeps_what_it_has_and_leaves_no_process(tmp_path, number):
    made = [
        ("good", [str(script(tmp_path, "good", "print('{\"value\": 1}')"))]),
        ("hang", [str(script(tmp_path, "hang", HANG)), str(tmp_path / "pid")]),
        ("never", [str(script(tmp_path, "never", "print('{\"value\": 1}')"))]),
    ]
    command = [sys.executable, "-c", DRIVER, str(BENCHMARKS), json.dumps(made), str(tmp_path / "out")]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2, "the guard and the part"
        process.send_signal(number)
        said, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    until(lambda: not any(alive(p.pid) for p in family) and not alive(int((tmp_path / "pid").read_text())))
    report = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert report["parts"]["good"]["result"] == {"value": 1} and not report["finished"]
    assert "never" not in report["parts"]
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "--keep" in said
        assert report["parts"]["hang"]["status"] == "interrupted"


def test_the_objects_lines_may_have_others_before_them_and_none_after():
    assert read_object('x\n{\n "a": 1\n}\n') == {"a": 1}
    for text in ("", "x", '{"a": 1}\nmore', "[]"):
        with pytest.raises(ValueError):
            read_object(text)


# --- the suite --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.03, 1.0, 3.0])
def test_every_command_names_a_script_and_options_that_it_has(scale):
    found = suite.parts(scale, "GAMES", "SHOP")
    assert len({part.name for part in found}) == len(found) >= 13
    for part in found:
        source = (BENCHMARKS / part.command[0]).read_text()
        for word in part.command[1:]:
            if word.startswith("--"):
                assert f'"{word}"' in source, (part.name, word)
    words = [word for part in found for word in part.command]
    assert "GAMES" in words and "SHOP" in words


def test_without_folders_no_part_asks_for_data_and_scale_one_has_the_sizes_of_the_issue():
    commands = {part.name: " ".join(part.command) for part in suite.parts()}
    assert not any("--data" in command for command in commands.values())
    assert "--sizes 256 1000 10000 100000 1000000" in commands["composer"]
    assert "--envs 1 4 16" in commands["scienceworld"] and "--workers 1 4 16" in commands["alfworld_pool"]
    assert "--turns 10 20 40" in commands["learner"] and "--turns 10 20 40" in commands["engine_context"]
    documents = commands["webshop_search"].partition("--documents ")[2].partition(" --")[0].split()
    assert max(map(int, documents)) <= 100_000
    at_most = {part.name: part.deadline_s for part in suite.parts()}
    assert at_most["scienceworld"] <= 180


def test_sizes_shrink_together_and_equal_ones_are_one():
    n = suite.Sizes(0.1)
    assert n(1000) == "100" and n(3) == "1" and n(30, 20) == "20"
    assert n.all(1, 4, 16) == ["1", "2"] and n.seconds(6) == "0.6" and n.seconds(1) == "0.5"


def test_unknown_parts_are_refused_with_the_names_of_those_there_are(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        suite.main(["--only", "composer,nonsense", "--out", str(tmp_path)])
    assert stopped.value.code == 2 and re.search("nonsense.*expected.*alfworld", capsys.readouterr().err)
    assert not (tmp_path / "bench.json").exists()


def test_a_real_part_in_small_goes_through_to_the_page(tmp_path):
    assert suite.main(["--only", "composer", "--scale", "0.002", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "benchmarks.md").read_text()
    assert "## Composing a batch" in text and "`divopd-base`" in text and "composer: ms, `divopd`" in text
    assert "Sizes were multiplied by 0.002" in text and str(ROOT) not in text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_in_small_is_done_or_says_why_it_is_left_out(tmp_path):
    assert suite.main(["--scale", "0.05", "--out", str(tmp_path), "--minutes", "25"]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    left_out = {name for name, part in report["parts"].items() if part["status"] != "done"}
    assert left_out <= {"webshop_oracle", "report_page"} and len(report["parts"]) == len(suite.parts())


def test_every_script_of_the_suite_has_a_table_and_no_table_is_for_nothing():
    used = {Path(part.command[0]).stem for part in suite.parts()}
    assert used == set(tables.TABLES)
