import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fakes import ENV_ID
from run_fakes import fake_run

from divopd_gym.errors import ConfigError
from divopd_trainer.cli import COMMANDS, main
from divopd_trainer.cli_options import Parser, add_function_options, mapping
from divopd_trainer.play import play

EVAL = ["eval", "--env_id", ENV_ID, "--model", "none", "--engine", "fakes:build", "--prompt_style", "tiny"]


def run(argv, capsys):
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return str(fake_run(tmp_path_factory.mktemp("runs") / "a", updates=6))


def test_the_command_line_comes_up_without_torch():
    code = (
        "import sys, divopd_trainer.cli as c; c.main(['--help']); c.main(['report', 'nowhere']); "
        "print([m for m in ('torch', 'transformers', 'trl', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_help_names_every_command(capsys):
    for argv in ([], ["--help"]):
        code, out, _ = run(argv, capsys)
        assert code == 0 and all(f"  {name} " in out for name in COMMANDS)


def test_an_unknown_command_is_refused_with_the_closest_one(capsys):
    code, out, err = run(["reprot"], capsys)
    assert code == 2 and not out and "'report'" in err


@pytest.mark.parametrize("argv", [["replay", "nowhere"], ["report", "nowhere"]])
def test_an_error_is_one_block_without_traceback(argv, capsys, monkeypatch):
    monkeypatch.delenv("DIVOPD_DEBUG", raising=False)
    code, out, err = run(argv, capsys)
    assert code == 2 and not out
    assert err.startswith(f"divopd {argv[0]} cannot go on (RecordError):\n  nowhere does not exist; expected")
    assert "Traceback" not in err and "--run_dir" in err


def test_debug_shows_where_an_error_came_from(monkeypatch):
    monkeypatch.setenv("DIVOPD_DEBUG", "1")
    with pytest.raises(ValueError, match="does not exist"):
        main(["replay", "nowhere"])


def test_a_missing_package_is_named_with_the_remedy(capsys, monkeypatch):
    def fail(argv):
        raise ModuleNotFoundError("No module named 'zstandard'", name="zstandard")

    monkeypatch.setattr("divopd_trainer.commands.replay.main", fail)
    code, _, err = run(["replay", "x"], capsys)
    assert code == 2 and "'zstandard'" in err and "`pip install 'divopd[all]'`" in err


# --- options ------------------------------------------------------------------------------------------------------


def example(episodes: int, out: str | Path = "x", noise: float | tuple[float, float] = 0.2, warm: bool = False,
            env_kwargs: dict | None = None, more: list[str] | None = None):  # fmt: skip
    """Do it.

    Args:
        episodes: How many, 100 % of
            them.
        out: Where.
        noise: Share.
        warm: Whether.
        env_kwargs: What.
        more: Names.

    Returns:
        Nothing.
    """


def parse(argv, capsys=None):
    parser = Parser("x", "y")
    names = add_function_options(parser, example)
    args = parser.parse(argv)
    return {name: getattr(args, name) for name in names}


def test_options_follow_a_functions_signature():
    assert parse(["--episodes", "3"]) == dict(
        episodes=3, out="x", noise=0.2, warm=False, env_kwargs=None, more=None
    )
    text = "--episodes 3 --out 5 --noise 0.1 0.3 --warm --env_kwargs family=tiny,n=3 --more a b"
    assert parse(text.split()) == dict(
        episodes=3,
        out="5",
        noise=[0.1, 0.3],
        warm=True,
        env_kwargs={"family": "tiny", "n": 3},
        more=["a", "b"],
    )
    assert parse(["--episodes", "3", "--noise", "0.5"])["noise"] == 0.5


def test_help_shows_the_docstring_and_the_default(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "How many, 100 % of them. (required)" in out and "Share. (default: 0.2)" in out


def test_the_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("episodes: 3\nnoise: 0.4\nenv_kwargs: {family: small}\nwarm: true\n")
    values = parse(["--config", str(path), "--noise", "0.1"])
    assert (values["episodes"], values["noise"], values["warm"]) == (3, 0.1, True)
    assert values["env_kwargs"] == {"family": "small"}
    assert parse([str(path), "--noise", "0.1"]) == values


@pytest.mark.parametrize("command", ["train", "launch", "compare", "eval", "expert", "sft"])
def test_the_first_word_is_the_file_of_settings(command, tmp_path, capsys):
    for words in (["missing.yaml"], ["--config", "missing.yaml"]):
        code, _, err = run([command, *words], capsys)
        assert code == 2 and "no configuration file missing.yaml" in " ".join(err.split()), err


def test_unknown_keys_of_a_file_name_the_closest_known(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("episode: 3\n")
    with pytest.raises(ConfigError, match="'episode' .did you mean 'episodes'"):
        parse(["--config", str(path)])
    with pytest.raises(ConfigError, match="no configuration file"):
        parse(["--config", str(tmp_path / "no.yaml")])
    path.write_text("- 3\n")
    with pytest.raises(ConfigError, match="holds a list"):
        parse(["--config", str(path)])


@pytest.mark.parametrize("text", ["{family: tiny, n: 3}", "family=tiny,n=3", '{"family": "tiny", "n": 3}'])
def test_mappings_on_the_command_line(text):
    assert mapping(text) == {"family": "tiny", "n": 3}


# --- replay and report --------------------------------------------------------------------------------------------


def test_replay_prints_a_table_and_writes_json(run_dir, tmp_path, capsys):
    target = tmp_path / "deep" / "r.json"
    code, out, _ = run(["replay", run_dir, "--presets", "vanilla,divopd", "--json", str(target)], capsys)
    assert code == 0
    assert "valid rollouts never used" in out and "divopd: 6 of 6 batches" in out
    figures = json.loads(target.read_text())
    assert set(figures["presets"]) == {"vanilla", "divopd"}
    assert figures["settings"]["batch_rows"] == 16
    assert (
        figures["presets"]["vanilla"]["effective_rollouts"]
        < figures["presets"]["divopd"]["effective_rollouts"]
    )


def test_replay_takes_other_settings(run_dir, capsys):
    argv = ["replay", run_dir, "--presets", "divopd", "--cap", "none", "--batch_rows", "8", "--json", "-"]
    code, out, _ = run(argv, capsys)
    assert code == 0 and json.loads(out)["settings"]["cap"] is None
    code, out, _ = run([*argv, "--pace", "1"], capsys)
    assert json.loads(out)["presets"]["divopd"]["updates"] > 6


@pytest.mark.parametrize("more", [["--presets", "nope"], ["--tail", "0"], ["--load", "0"]])
def test_replay_refuses_what_cannot_work(run_dir, more, capsys):
    code, _, err = run(["replay", run_dir, *more], capsys)
    assert code == 2 and "expected" in err or "choose" in err


def test_a_cap_of_nothing_is_refused(run_dir):
    with pytest.raises(SystemExit) as ended:
        main(["replay", run_dir, "--cap", "0"])
    assert ended.value.code == 2


def test_report_tells_where_it_wrote(run_dir, tmp_path, capsys):
    teacher = tmp_path / "t.json"
    teacher.write_text(json.dumps({"success_rate": 0.5, "episodes": 10}))
    out_file = str(tmp_path / "r.html")
    code, out, _ = run(["report", run_dir, "--out", out_file, "--no-png", "--teacher", str(teacher)], capsys)
    assert code == 0 and out.strip() == out_file
    assert "24-76 %, 10 episodes" in Path(out_file).read_text()
    code, _, err = run(["report", run_dir, "--labels", "a,b"], capsys)
    assert code == 2 and "2 labels for 1 run" in err


# --- play ---------------------------------------------------------------------------------------------------------


def played(text, **more):
    out = io.StringIO()
    info = play(ENV_ID, {"lengths": (2,)}, source=io.StringIO(text), out=out, **more)
    return info, out.getvalue()


def test_play_takes_numbers_and_free_text():
    info, out = played("1\nla la\ngo 2\n", task="2/0")
    assert info["success"] and info["turns_played"] == 3
    assert (
        "You are at 0." in out and "(not a valid action here)" in out and "solved in 3 turns, score 1" in out
    )


def test_play_answers_without_using_a_turn():
    info, out = played("?\ngold\n77\n\nquit\n", seed=0)
    assert info["turns_played"] == 0
    assert (
        "there is no expert" in out and "from the start: go 1; go 2" in out and "There is no action 77" in out
    )


def test_play_ends_with_its_input():
    info, out = played("wait\n", seed=0)
    assert info["turns_played"] == 1 and not info["success"] and "left after 1 turns" in out


def test_play_works_when_piped():
    argv = [sys.executable, "-m", "divopd_trainer.cli", "play", "--env_id", ENV_ID, "--task", "2/0"]
    env = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{Path(__file__).parents[2]}"}
    done = subprocess.run(argv, input="1\n1\n", capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0 and "solved in 2 turns" in done.stdout, done.stderr


def test_play_refuses_an_unknown_environment(capsys):
    code, _, err = run(["play", "--env_id", "divopd_gym/Nothing-v0"], capsys)
    assert code == 2 and "divopd_gym/ALFWorld-v0" in err
    code, _, err = run(["play", "--env_id", ENV_ID, "--env_kwargs", "colour=red"], capsys)
    assert code == 2 and "colour" in err


@pytest.mark.env
def test_the_expert_of_a_generated_house_can_be_followed_by_its_hints():
    pytest.importorskip("textworld")

    class Follower:
        """Asks for a hint, then types it."""

        def __init__(self):
            self.out, self.asked = io.StringIO(), False

        def __iter__(self):
            return self

        def __next__(self):
            self.asked = not self.asked
            return (
                "?" if self.asked else self.out.getvalue().rsplit("the expert would: ", 1)[1].splitlines()[0]
            )

    follower = Follower()
    info = play(
        "divopd_gym/ALFWorld-v0",
        dict(split="generated", family="tiny"),
        seed=1,
        source=follower,
        out=follower.out,
    )
    assert info["success"]


# --- eval ---------------------------------------------------------------------------------------------------------


def test_eval_plays_every_task_once_and_records_it(tmp_path, capsys):
    out_file, records = tmp_path / "e.json", tmp_path / "records"
    more = ["--workers", "2", "--out", str(out_file), "--records", str(records), "--env_kwargs", "tasks=7"]
    code, out, err = run([*EVAL, *more], capsys)
    assert code == 0, err
    result = json.loads(out_file.read_text())
    assert result["episodes"] == 7 and result["success_rate"] == 1.0 and result["who"] == "student"
    assert set(result["per_type"]) == {"2", "3", "4"} and "95 %" in out and "100.0%" in out
    from divopd_trainer.records import read_rollouts

    assert sorted(r.task for r in read_rollouts(records)) == sorted(
        f"{(2, 3, 4)[i % 3]}/{i}" for i in range(7)
    )


def test_eval_understands_the_settings_of_a_run(tmp_path, capsys):
    path = tmp_path / "train.yaml"
    settings = dict(
        env_id=ENV_ID, env_kwargs={"tasks": 9}, eval_env_kwargs={"lengths": [2]}, eval_split=None, eval_episodes=4,
        engine="fakes:build", prompt_style="tiny", model="none", teacher="good", learning_rate=1e-4, env_workers=2,
    )  # fmt: skip
    path.write_text(yaml.safe_dump(settings))
    out_file = tmp_path / "e.json"
    argv = ["eval", str(path), "--policy", "teacher", "--out", str(out_file)]
    code, _, err = run(argv, capsys)
    assert code == 0, err
    result = json.loads(out_file.read_text())
    assert (result["who"], result["model"], result["episodes"]) == ("teacher", "good", 4)
    assert set(result["per_type"]) == {"2"}
    path.write_text(yaml.safe_dump(settings | {"learning_rat": 1}))
    code, _, err = run(argv, capsys)
    assert code == 2 and "learning_rate" in err


def test_eval_of_a_run_that_did_not_end_names_its_checkpoints(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("temperature: 4e-1\n")
    (tmp_path / "checkpoints" / "checkpoint-7").mkdir(parents=True)
    code, _, err = run(["eval", "--run", str(tmp_path)], capsys)
    assert code == 2 and "checkpoint-7" in err and "no final student" in " ".join(err.split())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["eval"], "No model"),
        (["eval", "--model", "./nothing"], "no model directory"),
        (["eval", "--model", "x", "--temperature", "-1"], "temperature"),
        (["eval", "--run", "./nothing"], "config.yaml"),
        (["eval", "--run", "a", "--config", "b"], "one of them"),
    ],
)
def test_eval_refuses_what_cannot_work(more, said, capsys):
    code, _, err = run(more, capsys)
    assert code == 2 and said in err


# --- train and data -----------------------------------------------------------------------------------------------


def test_train_help_lists_every_setting_with_its_default(capsys):
    from divopd_trainer.config import DivOPDConfig

    code, out, _ = run(["train", "--help"], capsys)
    assert code == 0
    assert "--batch_rows" in out and "(default: 64)" in out and "--learning_rate" in out and "1e-06" in out
    missing = [
        name for name in DivOPDConfig.__annotations__ if not name.startswith("_") and f"--{name}" not in out
    ]
    assert missing == []
    assert "--adafactor" not in out
    assert len(run(["train", "--help_all"], capsys)[1]) > 2 * len(out)


def test_train_refuses_an_unknown_setting(capsys):
    code, _, err = run(["train", "--batch_row", "3"], capsys)
    assert code == 2 and "batch_rows" in err and "Traceback" not in err


def test_data_check_of_an_empty_folder_says_what_is_missing(tmp_path, capsys):
    code, _, err = run(["data", "check", "alfworld", "--data_dir", str(tmp_path)], capsys)
    assert code == 2 and str(tmp_path) in err


# --- expert and sft -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "option"), [("expert", "--noise"), ("sft", "--observation_weight")])
def test_help_of_expert_and_sft_follows_their_functions(command, option, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert option in out and "(default:" in out


def test_sft_refuses_a_missing_recording(tmp_path, capsys):
    argv = ["sft", "--model", "tiny", "--episodes", str(tmp_path / "no"), "--out", str(tmp_path / "m")]
    code, _, err = run(argv, capsys)
    assert code == 2 and "divopd expert --out" in err


def test_expert_refuses_an_environment_without_one(tmp_path, capsys):
    argv = [
        "expert",
        "--env_id",
        ENV_ID,
        "--episodes",
        "1",
        "--workers",
        "1",
        "--out",
        str(tmp_path / "e.zst"),
    ]
    code, _, err = run(argv, capsys)
    assert code == 2 and "expert" in err and "Traceback" not in err


@pytest.mark.env
def test_a_tiny_model_goes_from_recording_to_evaluation(tmp_path, capsys):
    pytest.importorskip("textworld")
    episodes, model = tmp_path / "e.jsonl.zst", tmp_path / "model"
    house = "split=generated,family=tiny,num_tasks=3"
    argv = ["expert", "--env_kwargs", house, "--episodes", "6", "--workers", "1", "--out", str(episodes)]
    assert run(argv, capsys)[0] == 0
    shape = "tiny:layers=1,width=32,heads=2,mlp=64,positions=512"
    argv = [
        "sft",
        "--model",
        shape,
        "--episodes",
        str(episodes),
        "--out",
        str(model),
        "--updates",
        "3",
        "--quiet",
    ]
    assert run(argv, capsys)[0] == 0
    out_file = tmp_path / "eval.json"
    argv = ["eval", "--model", str(model), "--env_kwargs", house, "--prompt_style", "tiny", "--max_tokens", "6",
            "--max_turns", "3", "--workers", "1", "--out", str(out_file)]  # fmt: skip
    code, _, err = run(argv, capsys)
    assert code == 0, err
    assert json.loads(out_file.read_text())["episodes"] == 3


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["methods"], ["--version"]])
def test_a_reader_that_leaves_is_no_error(words):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "divopd_trainer.cli", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
