import json
import shutil

import numpy as np
import pytest
import torch
from learner_fakes import random_rollout
from run_fakes import fake_run

from divopd_gym.errors import ConfigError
from divopd_trainer.cli import main
from divopd_trainer.gradient_audit import (
    Choice,
    agreement,
    audit_choice,
    choices,
    load_turns,
    turn_gradients,
)
from divopd_trainer.records import BatchRecord, RunWriter, read_run
from divopd_trainer.replay import Variant, load_stream
from divopd_trainer.turns import score_turn

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(student):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64)


def by_hand(model, turn, temperature=1.0):
    """DivOPD section 2 for one turn, read literally."""
    model.zero_grad()
    ids = torch.from_numpy(turn.segment.token_ids[: turn.end].astype(np.int64))
    logp = torch.log_softmax(model(input_ids=ids[None]).logits[0] / temperature, -1)
    places = np.flatnonzero(turn.valid_mask())
    for i in places:
        now = logp[turn.start + i - 1, ids[turn.start + i]]
        (-(float(turn.teacher_logprobs[i]) - now.detach()) * now / len(places)).backward(retain_graph=True)
    return torch.cat([p.grad.flatten().clone() for p in model.parameters()])


def close(a, b):
    return float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


def test_agreement_by_hand():
    found = agreement(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0]))
    assert found.projection == pytest.approx(0.5) and found.cosine == pytest.approx(2**-0.5)
    assert (found.norm_pool, found.norm_batch) == pytest.approx((2.0, 2**0.5))
    against = agreement(torch.tensor([1.0, 2.0]), torch.tensor([-1.0, -2.0]))
    assert (against.projection, against.cosine) == pytest.approx((-1.0, -1.0))
    assert agreement(torch.zeros(2), torch.ones(2)).projection is None
    assert agreement(torch.ones(2), torch.zeros(2)).cosine is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_turn_has_its_own_exact_gradient(model, temperature):
    turns = random_rollout(None, 1).turns + random_rollout(None, 2).turns
    mask = np.zeros(turns[4].n_tokens, bool)
    mask[0] = True
    turns[4] = score_turn(turns[4], turns[4].teacher_logprobs, mask)
    turns[1] = score_turn(turns[1], None)
    found = dict(turn_gradients(model, turns, temperature))
    assert sorted(found) == [0, 2, 3, 4, 5]
    for place, gradient in found.items():
        assert close(gradient, by_hand(model, turns[place], temperature))


def test_the_whole_pool_agrees_with_itself_and_dead_rows_shrink_the_batch(model):
    turns = {(turn.rollout_id, turn.index): turn for r in (1, 2) for turn in random_rollout(None, r).turns}
    turns[2, 2] = score_turn(turns[2, 2], None)
    pool = [key for key in turns if key != (2, 2)]
    choice = Choice(3, pool, {"all": pool, "half dead": [(1, 0), (2, 2)], "dead": [(2, 2)]})
    seen = []
    found = audit_choice(model, choice, turns, on_turn=lambda done, total: seen.append((done, total)))
    assert (found["all"].projection, found["all"].cosine) == pytest.approx((1.0, 1.0))
    whole = sum(by_hand(model, turns[key]) for key in pool) / 5
    one = by_hand(model, turns[1, 0]) / 2
    inner, norms = float(whole @ one), (float(whole.norm()), float(one.norm()))
    half = found["half dead"]
    assert half.projection == pytest.approx(inner / norms[0] ** 2, rel=1e-4)
    assert half.cosine == pytest.approx(inner / norms[0] / norms[1], rel=1e-4)
    assert (half.norm_pool, half.norm_batch) == pytest.approx(norms, rel=1e-4)
    assert (half.rows, half.dead_rows) == (2, 1)
    assert found["dead"].projection == 0 and found["dead"].cosine is None
    assert found["all"].disagreement_std == pytest.approx(
        abs(sum(turns[1, i].score for i in range(3)) - sum(turns[2, i].score for i in range(2))) / 2
    )
    assert seen[-1] == (5, 5)


def test_a_pool_without_a_valid_turn_is_refused(model):
    with pytest.raises(ConfigError, match="--updates"):
        audit_choice(model, Choice(3, [], {"divopd": []}), {})


def test_every_preset_chooses_from_the_pool_of_the_run(tmp_path):
    run = read_run(fake_run(tmp_path / "run", updates=8, load=3.0))
    stream = load_stream(run)
    variants = [Variant.parse(name) for name in ("vanilla", "divopd", "divopd:1", "top-b", "divopd-cost")]
    found = choices(stream, variants, [4, 8])
    assert [choice.update for choice in found] == [4, 8]
    for choice in found:
        pool = set(choice.pool)
        assert len(pool) == len(choice.pool) > 16
        for label in ("divopd", "divopd:1", "top-b", "divopd-cost"):
            assert set(choice.selected[label]) <= pool
        # The queue is the run's own, so its preset makes the very batch that was recorded.
        assert choice.selected["divopd"] == stream.recorded[choice.update]
        assert choice.selected["divopd"] != choice.selected["divopd:1"]
    assert len(load_turns(run, set(found[0].pool))) == len(found[0].pool)


def test_updates_that_were_not_recorded_are_refused(tmp_path):
    stream = load_stream(read_run(fake_run(tmp_path / "run", updates=3)))
    with pytest.raises(ConfigError, match=r"\[9\] were not recorded; expected numbers from 1 to 3"):
        choices(stream, [Variant.parse("divopd")], [2, 9])


# --- divopd audit --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, student):
    path = tmp_path_factory.mktemp("runs") / "run"
    settings = dict(
        preset="divopd", batch_rows=4, pool_multiplier=4, cap=2, max_staleness=2, max_pending_age=8, seed=0
    )
    with RunWriter(path, settings=settings) as writer:
        for update in (1, 2):
            rollouts = [random_rollout(None, 2 * update + n) for n in range(2)]
            for rollout in rollouts:
                writer.write_rollout(rollout)
            keys = [(turn.rollout_id, turn.index) for rollout in rollouts for turn in rollout.turns]
            writer.write_batch(BatchRecord(update, keys[:4], arrivals=keys))
    shutil.copytree(student, path / "checkpoints" / "checkpoint-1")
    (path / "checkpoints" / ".partial-2").mkdir()
    return str(path)


def test_audit_takes_each_checkpoint_at_the_update_after_it(run_dir, capsys):
    assert main(["audit", run_dir, "--presets", "divopd,no-cap", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [(line["update"], line["preset"], line["rows"]) for line in figures["audits"]] == [
        (2, "divopd", 4), (2, "no-cap", 4),
    ]  # fmt: skip
    assert all(-1 <= line["cosine"] <= 1 and line["norm_pool"] > 0 for line in figures["audits"])
    assert figures["diagnostics"]["updates"] == 2 and not figures["notices"]


def test_audit_says_when_the_weights_are_not_the_updates_own(run_dir, student, tmp_path, capsys):
    late = tmp_path / "checkpoint-2"
    shutil.copytree(student, late)
    target = tmp_path / "out" / "audit.json"
    assert main(["audit", run_dir, "--model", str(late), "--presets", "divopd", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "cos(G,Ghat)" in out and "Note: Update 2 started from version 1" in out
    assert json.loads(target.read_text())["audits"][0]["update"] == 2


def test_audit_without_a_model_still_shows_what_the_batches_were(run_dir, capsys):
    assert main(["audit", run_dir, "--model", "none"]) == 0
    out = capsys.readouterr().out
    assert "turn of the episode" in out and "teacher tokens scored per token trained" in out
    assert "Ghat" not in out


def test_a_checkpoint_without_a_number_needs_the_updates(run_dir, student, capsys):
    assert main(["audit", run_dir, "--model", student]) == 2
    assert "--updates" in capsys.readouterr().err
    named = ["audit", run_dir, "--model", student, "--updates", "1,2", "--presets", "divopd", "--json", "-"]
    assert main(named) == 0
    assert [line["update"] for line in json.loads(capsys.readouterr().out)["audits"]] == [1, 2]


@pytest.mark.parametrize(
    ("more", "named"),
    [(["--presets", "dvopd"], "Unknown preset 'dvopd'"), (["--temperature", "0"], "temperature is 0.0")],
)
def test_bad_options_are_refused(run_dir, capsys, more, named):
    assert main(["audit", run_dir, *more]) == 2
    assert named in capsys.readouterr().err
