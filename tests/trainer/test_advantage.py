"""Advantages by hand: DivOPD's reverse KL, and f-OPD's freshness of a row."""

import dataclasses
import math

import pytest
import torch

from divopd_gym.errors import ConfigError
from divopd_trainer.advantage import FOPD, ReverseKL
from divopd_trainer.losses import advantage_loss
from divopd_trainer.packing import dummy_micro_batch


def micro(row, age, student, teacher):
    """A micro-batch of these tokens; nothing else in it matters to an advantage."""
    return dataclasses.replace(
        dummy_micro_batch(),
        row=torch.tensor(row),
        age=torch.tensor(age),
        student_logprobs=torch.tensor(student),
        teacher_logprobs=torch.tensor(teacher),
    )


def test_reverse_kl_is_teacher_minus_student_times_beta():
    batch = micro([0, 0], [0, 0], [-9.0, -9.0], [-1.0, -3.0])
    assert ReverseKL(0.5)(torch.tensor([-2.0, -1.0]), batch).tolist() == [0.5, -1.0]


def test_f_opd_an_unmoved_student_leaves_age_alone():
    batch = micro([0, 1, 2], [0, 1, 3], [-1.0, -2.0, -3.0], [0.0, 0.0, 0.0])
    assert FOPD().freshness(torch.tensor([-1.0, -2.0, -3.0]), batch).tolist() == [1.0, 0.5, 0.25]


# Ratios of 2 and 1/2: r log r - r + 1 = 0.386294 and 0.153426.
TWICE, HALF = 2 * math.log(2) - 1, 0.5 - 0.5 * math.log(2)


def test_f_opd_freshness_falls_with_the_root_of_the_rows_divergence():
    now = [-2.0 + math.log(2), -2.0 - math.log(2), -1.0 + math.log(2)]
    batch = micro([0, 0, 1], [1, 1, 0], [-2.0, -2.0, -1.0], [0.0, 0.0, 0.0])
    rows = [math.exp(-math.sqrt((TWICE + HALF) / 2)) / 2, math.exp(-math.sqrt(TWICE))]
    assert rows == pytest.approx([0.297415, 0.537124], abs=1e-5)
    found = FOPD().freshness(torch.tensor(now), batch)
    assert found.tolist() == pytest.approx([rows[0], rows[0], rows[1]], rel=1e-5)
    steeper = FOPD(rollout_coefficient=2.0).freshness(torch.tensor(now), batch)
    assert float(steeper[2]) == pytest.approx(math.exp(-2 * math.sqrt(TWICE)), rel=1e-5)


def test_f_opd_supervision_that_drifted_costs_freshness_too():
    batch = micro([0], [0], [-1.0], [0.0])
    found = FOPD(supervision_coefficient=3.0).freshness(torch.tensor([-1.0]), batch, 0.25)
    assert float(found) == pytest.approx(math.exp(-1.5))


def test_f_opd_estimates_the_divergence_of_the_student_now_from_the_one_that_wrote():
    """Exact over a vocabulary of three: tokens come as often as the student that wrote them says."""
    wrote, now = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    tokens = torch.tensor([0, 0, 1, 2])
    batch = micro([0] * 4, [0] * 4, wrote.log()[tokens].tolist(), [0.0] * 4)
    exact = float((now * (now / wrote).log()).sum())
    found = FOPD().freshness(now.log()[tokens], batch)
    assert found.tolist() == pytest.approx([math.exp(-math.sqrt(exact))] * 4, rel=1e-5)


def test_f_opd_weighs_the_reverse_kl_by_what_lies_above_the_threshold():
    batch = micro([0, 1], [0, 3], [-1.0, -1.0], [-2.0, -2.0])
    now = torch.tensor([-1.0, -1.0])
    assert FOPD(threshold=0.4, beta=2.0)(now, batch).tolist() == pytest.approx([-2.0 * 0.6, 0.0])


def test_f_opd_rows_of_a_micro_batch_do_not_mix_whatever_their_numbers():
    apart = FOPD().freshness(torch.tensor([-1.5]), micro([7], [0], [-1.0], [0.0]))
    both = FOPD().freshness(torch.tensor([-4.0, -1.5]), micro([2, 7], [0, 0], [-1.0, -1.0], [0.0, 0.0]))
    assert both[1] == apart[0] and both[0] < both[1]


def test_f_opd_dummies_and_empty_micro_batches_are_nothing_special():
    dummy = dummy_micro_batch()
    assert int(dummy.row) == -1
    advantage = FOPD()(torch.tensor([-3.0]), dummy)
    assert advantage.shape == (1,) and bool(torch.isfinite(advantage).all())
    logp = torch.tensor([-3.0], requires_grad=True)
    advantage_loss(logp, advantage, dummy.weights, dummy.rewards).backward()
    assert float(logp.grad) == 0.0
    empty = micro([], [], [], [])
    assert FOPD().freshness(torch.zeros(0), empty).shape == (0,)


def test_f_opd_stays_finite_however_far_the_student_went_and_without_log_probs():
    batch = micro([0, 1, 2], [0, 0, 0], [-200.0, -0.1, math.nan], [-1.0, -1.0, -1.0])
    found = FOPD().freshness(torch.tensor([-0.1, -200.0, -1.0]), batch)
    assert bool(torch.isfinite(found).all())
    assert float(found[0]) == 0.0 and float(found[2]) == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"rollout_coefficient": -1.0},
        {"supervision_coefficient": -1.0},
        {"threshold": 1.0},
        {"threshold": -0.1},
    ],
)
def test_f_opd_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="f-OPD has coefficients"):
        FOPD(**options)
