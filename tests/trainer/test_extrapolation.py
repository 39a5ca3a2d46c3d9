"""EffOPD: candidates along the last change are played and the best is kept, through the trainer and its checkpoints."""

from pathlib import Path

import pytest
import torch
from learner_fakes import FakeExplorer, config, random_rollout

from divopd_gym.errors import ConfigError
from divopd_trainer.engines.weights import read_policy
from divopd_trainer.explorer.messages import EvalDone, ExplorerDied
from divopd_trainer.extrapolation import best_factor
from divopd_trainer.metrics_log import read_metrics
from divopd_trainer.trainer import DivOPDTrainer


class Judge(FakeExplorer):
    """Gives the candidates of one attempt these success rates in turn; None: that evaluation fails."""

    def __init__(self, rates, state=None):
        super().__init__(random_rollout, state=state)
        self.rates, self.asked, self.played = list(rates), [], []

    def evaluated(self, message):
        rate = self.rates[len(self.asked) % len(self.rates)]
        self.asked.append(message)
        self.played.append(read_policy(message.path))
        self.answer(message, rate)

    def answer(self, message, rate):
        result = None if rate is None else {"success_rate": rate, "episodes": message.episodes}
        self.eval_results.put(EvalDone(message.request_id, result, "it broke", message.version))


class Watched(DivOPDTrainer):
    """Notes the weights right before and right after each hand-over, and the files handed over."""

    def _sync_weight(self):
        self.seen = getattr(self, "seen", [])
        before = state(self)
        super()._sync_weight()
        handed = read_policy(self.policy_files.path(self.state.global_step))
        self.seen.append((before, state(self), handed))


def state(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def build(tmp_path, student, explorer, **changes):
    settings = {"learner_threads": 1, "updates": 2, "method": "eff-opd", "extrapolate_every": 2}
    made = []

    def make(explorer_state, path):
        made.append(explorer(explorer_state))
        return made[0]

    trainer = Watched(config(tmp_path, student, **{**settings, **changes}), explorer=make)
    return trainer, made[0]


def lines(tmp_path, kind="extrapolation"):
    return read_metrics(tmp_path / "run", [kind])


def along(last, now, factor):
    return {name: now[name] + factor * (now[name] - last[name]) for name in now}


def assert_same(found, expected):
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def differ(one, other):
    return any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "scores, best",
    [
        ({0.0: 0.5, 0.5: 0.6, 1.0: 0.7}, 1.0),
        ({0.0: 0.5, 0.5: 0.5, 1.0: 0.5}, 0.0),
        ({0.0: 0.5, 0.5: 0.6, 1.0: 0.6}, 0.5),
        ({0.0: 0.5, 0.5: None, 1.0: 0.4}, 0.0),
        ({0.0: 0.5, 0.5: None, 1.0: 0.6}, 1.0),
        ({0.0: None, 0.5: 0.9, 1.0: 0.9}, 0.0),
    ],
)
def test_the_best_is_kept_ties_go_to_the_smaller_factor_and_the_lost_are_not_chosen(scores, best):
    assert best_factor(scores) == best


def test_candidates_lie_on_the_line_through_the_last_weights_and_the_best_is_handed_over(tmp_path, student):
    trainer, explorer = build(tmp_path, student, lambda s: Judge([0.2, 0.3, 0.6], s))
    trainer.train()
    (_, start, _), (_, first, _), (before, after, handed) = trainer.seen
    assert differ(start, first) and differ(first, before)
    for played, factor in zip(explorer.played, (0.0, 0.5, 1.0), strict=True):
        assert_same(played, along(start, before, factor))
    assert_same(after, along(start, before, 1.0))
    assert_same(handed, after)
    (line,) = lines(tmp_path)
    assert (line["update"], line["policy_version"], line["factor"]) == (2, 2, 1.0)
    assert (line["factors"], line["success"], line["lost"]) == ([0.0, 0.5, 1.0], [0.2, 0.3, 0.6], 0)


def test_without_a_better_candidate_the_weights_are_exactly_what_the_update_made_them(tmp_path, student):
    trainer, _ = build(tmp_path, student, lambda s: Judge([0.5, 0.5, 0.4], s))
    trainer.train()
    before, after, _ = trainer.seen[-1]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [line["factor"] for line in lines(tmp_path)] == [0.0]


def test_the_candidates_play_the_same_first_tasks_with_the_weights_own_version(tmp_path, student):
    trainer, explorer = build(
        tmp_path, student, lambda s: Judge([0.5], s), extrapolate_episodes=3, seed=11, eval_temperature=0.7
    )
    trainer.train()
    assert len(explorer.asked) == 3
    facts = {(m.version, m.episodes, m.seed, m.temperature, m.max_turns) for m in explorer.asked}
    assert facts == {(2, 3, 11, 0.7, trainer.args.max_turns)}
    assert len({m.request_id for m in explorer.asked}) == 3
    assert not any(Path(m.path).exists() for m in explorer.asked)


def test_the_line_goes_on_from_the_weights_that_were_kept(tmp_path, student):
    trainer, explorer = build(tmp_path, student, lambda s: Judge([0.1, 0.2, 0.3], s), updates=4)
    trainer.train()
    kept, last = trainer.seen[2][1], trainer.seen[4][0]
    assert_same(explorer.played[5], along(kept, last, 1.0))
    assert [(line["update"], line["since_update"]) for line in lines(tmp_path)] == [(2, 0), (4, 2)]


def test_candidates_are_no_evaluations_of_the_run(tmp_path, student):
    trainer, explorer = build(
        tmp_path, student, lambda s: Judge([0.1, 0.9, 0.2], s), eval_every=1, eval_at_end=True
    )
    trainer.train()
    ordinary = [(line["update"], line["success_rate"]) for line in lines(tmp_path, "eval")]
    assert [update for update, _ in ordinary] == [1, 2]
    assert trainer.session.lost_evaluations == 0 and trainer.session.awaited == {}
    assert len(explorer.asked) == 5


def test_a_failed_evaluation_costs_its_candidate_and_nothing_else(tmp_path, student):
    trainer, _ = build(tmp_path, student, lambda s: Judge([0.1, 0.2, None], s))
    trainer.train()
    (line,) = lines(tmp_path)
    assert (line["factor"], line["success"], line["lost"]) == (0.5, [0.1, 0.2, None], 1)
    assert trainer.session.lost_evaluations == 0 and trainer.state.global_step == 2


class Silent(Judge):
    def answer(self, message, rate):
        if rate is not None:
            super().answer(message, rate)


def test_an_evaluation_that_never_answers_ends_with_its_deadline(tmp_path, student):
    trainer, explorer = build(tmp_path, student, lambda s: Silent([0.1, None, 0.3], s), eval_timeout_s=0.3)
    trainer.train()
    (line,) = lines(tmp_path)
    assert (line["factor"], line["success"]) == (1.0, [0.1, None, 0.3])
    late = EvalDone(explorer.asked[1].request_id, {"success_rate": 1.0}, None, 2)
    trainer.session._evaluation_done(late)
    assert lines(tmp_path, "eval") == []


class Mixed(Judge):
    def answer(self, message, rate):
        self.eval_results.put(EvalDone(message.request_id, {"success_rate": rate}, None, message.version - 1))


def test_an_answer_for_another_version_counts_for_nothing(tmp_path, student):
    trainer, _ = build(tmp_path, student, lambda s: Mixed([0.1, 0.9], s))
    trainer.train()
    (line,) = lines(tmp_path)
    assert (line["factor"], line["lost"]) == (0.0, 3)


class Dying(Judge):
    def answer(self, message, rate):
        self.error = ExplorerDied("exit code 9")


def test_a_dead_explorer_leaves_the_weights_as_they_were(tmp_path, student):
    trainer, _ = build(tmp_path, student, lambda s: Dying([0.1], s))
    trainer.train()  # update 2 is the last one, so nothing more is asked of the explorer
    before, after, _ = trainer.seen[-1]
    assert not differ(before, after)
    assert lines(tmp_path)[0]["lost"] == 3


class Stopping(Silent):
    session = None

    def answer(self, message, rate):
        self.session.request_stop("SIGINT")


def test_a_stop_ends_the_waiting_with_the_weights_of_the_update(tmp_path, student):
    trainer, explorer = build(tmp_path, student, lambda s: Stopping([None], s), updates=6)
    explorer.session = trainer.session
    trainer.train()
    before, after, _ = trainer.seen[-1]
    assert trainer.state.global_step == 2 and len(explorer.asked) == 1 and not differ(before, after)


def test_a_resumed_run_extrapolates_from_the_same_weights(tmp_path, student):
    straight, _ = build(
        tmp_path / "a", student, lambda s: Judge([0.1, 0.2, 0.3], s), updates=3, extrapolate_every=3
    )
    straight.train()
    first, _ = build(
        tmp_path / "b", student, lambda s: Judge([0.1], s), updates=3, extrapolate_every=3, save_every=1
    )
    first.session.train_line = stop_after(first, 2)
    first.train()
    assert first.state.global_step == 2 and first.rollout_worker.asked == []
    again, explorer = build(
        tmp_path / "b", student, lambda s: Judge([0.1, 0.2, 0.3], s), updates=3, extrapolate_every=3,
        resume_from_checkpoint=True,
    )  # fmt: skip
    again.train()
    start, (before, after, _) = straight.seen[0][1], again.seen[-1]
    assert_same(explorer.played[2], along(start, before, 1.0))
    assert_same(after, along(start, before, 1.0))
    assert [(line["update"], line["since_update"]) for line in lines(tmp_path / "b")] == [(3, 0)]


def test_an_update_is_not_extrapolated_twice_by_resuming_at_it(tmp_path, student):
    first, _ = build(tmp_path, student, lambda s: Judge([0.1, 0.2, 0.3], s), updates=3, save_every=1)
    first.session.train_line = stop_after(first, 2)
    first.train()
    again, explorer = build(
        tmp_path, student, lambda s: Judge([0.1], s), updates=3, resume_from_checkpoint=True
    )
    again.train()
    assert explorer.asked == []
    assert_same(again.seen[0][2], first.seen[-1][2])
    assert again.extrapolation.update == 2


def stop_after(trainer, update):
    inner = trainer.session.train_line

    def train_line(line):
        inner(line)
        if trainer.state.global_step == update:
            trainer.session.request_stop("SIGINT")

    return train_line


def test_weights_handed_over_every_second_update_are_extrapolated_only_there(tmp_path, student):
    trainer, _ = build(
        tmp_path, student, lambda s: Judge([0.1], s), updates=4, extrapolate_every=1, weight_sync_steps=2
    )
    trainer.train()
    assert [line["update"] for line in lines(tmp_path)] == [2, 4]


def test_a_run_without_extrapolation_has_none(tmp_path, student):
    trainer, explorer = build(
        tmp_path, student, lambda s: Judge([0.1], s), method="vanilla", extrapolate_every=0
    )
    trainer.train()
    assert trainer.extrapolation is None and explorer.asked == [] and lines(tmp_path) == []


def test_factors_that_are_no_numbers_are_refused(tmp_path, student):
    with pytest.raises(ConfigError, match="extrapolate_factors.*expected numbers"):
        build(tmp_path, student, lambda s: Judge([0.1], s), extrapolate_factors=[0.5, float("nan")])
