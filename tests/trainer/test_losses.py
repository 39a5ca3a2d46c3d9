import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divopd_gym.errors import ConfigError
from divopd_trainer.losses import (
    forward_kl_topk,
    jsd,
    multi_sample_reverse_kl,
    sample_candidates,
    sampled_reverse_kl,
    select_logprobs,
    topk_support,
)
from divopd_trainer.packing import dummy_micro_batch

torch.set_num_threads(1)


def numeric_gradient(function, x, eps=1e-6):
    gradient = torch.zeros_like(x)
    for index in itertools.product(*map(range, x.shape)):
        up, down = x.clone(), x.clone()
        up[index] += eps
        down[index] -= eps
        gradient[index] = (function(up) - function(down)) / (2 * eps)
    return gradient


def autograd(function, x):
    x = x.clone().requires_grad_()
    value = function(x)
    value.backward()
    return value.item(), x.grad


def logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHTS = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)


def test_sampled_reverse_kl_value_is_the_weighted_gap_and_gradient_is_minus_advantage():
    logp = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    teacher = torch.tensor([-0.5, -3.0, -0.5], dtype=torch.float64)
    value, gradient = autograd(lambda x: sampled_reverse_kl(x, teacher, WEIGHTS, beta=2.0), logp)
    assert value == pytest.approx(2 * (0.5 * -0.5 + 0.2 * 1.0 + 0))
    assert torch.allclose(gradient, -2.0 * (teacher - logp) * WEIGHTS)


def test_sampled_reverse_kl_is_the_reverse_kl_gradient_in_expectation():
    """Summed over every token the student could sample, with its probability, the gradient is KL(s||t)'s."""
    student, teacher = logits(5), torch.log_softmax(logits(5, seed=1), -1)

    def exact(x):
        s = torch.log_softmax(x, -1)
        return (s.exp() * (s - teacher)).sum()

    probabilities = torch.softmax(student, -1)
    _, estimated = autograd(
        lambda x: sampled_reverse_kl(torch.log_softmax(x, -1), teacher, probabilities), student
    )
    assert torch.allclose(estimated, autograd(exact, student)[1], atol=1e-12)


def reverse_kl(z, teacher):
    s = torch.log_softmax(z, -1)
    return (s.exp() * (s - teacher)).sum()


def drawn_together(student, teacher, n):
    """Every way in which n independent draws of one position can fall: probability, value, gradient."""
    for draws in itertools.product(range(len(student)), repeat=n):
        ids = torch.tensor([draws])

        def loss(z, ids=ids):
            logp = select_logprobs(z[None], ids)
            return multi_sample_reverse_kl(logp, teacher[ids], torch.ones(1, dtype=torch.float64), beta=1.5)

        probability = torch.softmax(student, -1)[list(draws)].prod().item()
        yield probability, *autograd(loss, student)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_multi_sample_reverse_kl_has_the_exact_value_and_gradient_in_expectation(n):
    student, teacher = logits(4), torch.log_softmax(logits(4, seed=1), -1)
    value, gradient = 0.0, torch.zeros(4, dtype=torch.float64)
    for probability, one_value, one_gradient in drawn_together(student, teacher, n):
        value += probability * one_value
        gradient += probability * one_gradient
    exact_value, exact = autograd(lambda z: 1.5 * reverse_kl(z, teacher), student)
    assert value == pytest.approx(exact_value, abs=1e-12)
    assert torch.allclose(gradient, exact, atol=1e-12)


def test_n_samples_have_an_nth_of_the_variance_of_one():
    student, teacher = logits(4), torch.log_softmax(logits(4, seed=1), -1)

    def variance(n):
        drawn = list(drawn_together(student, teacher, n))
        mean = sum(p * g for p, _, g in drawn)
        return sum(p * ((g - mean) ** 2).sum() for p, _, g in drawn).item()

    assert variance(1) > 0.01
    assert variance(3) == pytest.approx(variance(1) / 3)


def test_one_sample_is_the_sampled_reverse_kl():
    logp, teacher = logits(3, 1), logits(3, 1, seed=1)
    one = autograd(lambda x: multi_sample_reverse_kl(x, teacher, WEIGHTS, 2.0), logp)
    plain = autograd(lambda x: sampled_reverse_kl(x[:, 0], teacher[:, 0], WEIGHTS, 2.0), logp)
    assert one[0] == pytest.approx(plain[0]) and torch.allclose(one[1], plain[1])


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_draws_that_the_teacher_could_not_score_leave_the_mean_of_the_others(bad):
    logp, teacher = logits(3, 3), logits(3, 3, seed=1)
    teacher[0, 1] = teacher[1, 1] = teacher[1, 2] = bad
    value, gradient = autograd(lambda x: multi_sample_reverse_kl(x, teacher, WEIGHTS), logp)
    gap = (logp - teacher).tolist()
    by_hand = 0.5 * (gap[0][0] + gap[0][2]) / 2 + 0.2 * gap[1][0] + 0.3 * sum(gap[2]) / 3
    assert value == pytest.approx(by_hand)
    assert gradient[0, 1] == 0 and gradient[1, 1:].tolist() == [0, 0] and gradient.isfinite().all()
    assert gradient[1, 0].item() == pytest.approx(0.2 * gap[1][0])


def test_a_row_none_of_whose_draws_was_scored_adds_nothing():
    logp, teacher = logits(3, 2), logits(3, 2, seed=1)
    teacher[1] = math.nan
    value, gradient = autograd(lambda x: multi_sample_reverse_kl(x, teacher, WEIGHTS), logp)
    assert math.isfinite(value) and not gradient[1].any() and gradient.isfinite().all()


def test_candidates_begin_with_the_realised_token_and_missing_draws_have_no_score():
    micro = dummy_micro_batch()
    micro.target_ids = torch.tensor([7, 8])
    micro.teacher_logprobs = torch.tensor([-1.0, -2.0])
    micro.extra_ids = torch.tensor([[3, -1], [4, 5]])
    micro.extra_teacher_logprobs = torch.tensor([[-3.0, -9.0], [-4.0, math.nan]])
    ids, teacher = sample_candidates(micro)
    assert ids.tolist() == [[7, 3, 0], [8, 4, 5]]
    expected = torch.tensor([[-1, -3, math.nan], [-2, -4, math.nan]])
    assert torch.equal(teacher.nan_to_num(9.0), expected.nan_to_num(9.0))


def test_a_batch_without_extra_draws_is_refused_with_the_remedy():
    micro = dummy_micro_batch()
    micro.extra_ids = None
    with pytest.raises(ConfigError, match="extra_samples"):
        sample_candidates(micro)


def test_ratio_is_one_whatever_the_temperature():
    """The surrogate's gradient does not depend on the log-probs that were cached at generation."""
    z, ids = logits(3, 6), torch.tensor([1, 5, 0])
    teacher = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)

    def loss(x):
        return sampled_reverse_kl(select_logprobs(x, ids, temperature=0.7), teacher, WEIGHTS)

    now = torch.log_softmax(z / 0.7, -1).gather(1, ids[:, None])[:, 0]

    def by_hand(x):
        logp = torch.log(torch.softmax(x / 0.7, -1)).gather(1, ids[:, None])[:, 0]
        return (-(teacher - now) * WEIGHTS * logp).sum()

    assert torch.allclose(autograd(loss, z)[1], numeric_gradient(by_hand, z), atol=1e-7)


def full_kl(p, q):
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q) if a > -math.inf)


@pytest.mark.parametrize("k", [1, 3])
def test_forward_kl_with_a_tail_is_the_kl_of_the_coarsened_distributions(k):
    z, teacher = logits(3, 6), torch.log_softmax(logits(3, 6, seed=1), -1)
    top = teacher.topk(k).indices

    def loss(x):
        return forward_kl_topk(select_logprobs(x, top), teacher.gather(1, top), WEIGHTS)

    def coarse(row, ids):
        inside = [row[i].item() for i in ids]
        return [*inside, math.log(1 - sum(map(math.exp, inside)))]

    student = torch.log_softmax(z, -1)
    expected = sum(
        w * full_kl(coarse(teacher[n], top[n]), coarse(student[n], top[n])) for n, w in enumerate(WEIGHTS)
    )
    value, gradient = autograd(loss, z)
    assert value == pytest.approx(float(expected), rel=1e-6)
    assert torch.allclose(gradient, numeric_gradient(loss, z), atol=1e-6)


def test_renormalized_support_compares_conditional_distributions():
    z, teacher = logits(1, 4), torch.log_softmax(logits(1, 4, seed=1), -1)
    top = torch.tensor([[0, 2]])
    value = forward_kl_topk(select_logprobs(z, top), teacher.gather(1, top), WEIGHTS[:1], "renormalized")
    p, q = torch.log_softmax(teacher[0, [0, 2]], -1), torch.log_softmax(z[0, [0, 2]], -1)
    assert value.item() == pytest.approx(0.5 * full_kl(p.tolist(), q.tolist()))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_on_topk_with_a_tail_is_that_of_the_coarsened_distributions(beta, k):
    z, teacher = logits(1, 6), torch.log_softmax(logits(1, 6, seed=1), -1)
    top = teacher.topk(k).indices

    def coarse(row):
        inside = [row[i] for i in top[0]]
        return torch.stack([*inside, torch.log(1 - torch.stack(inside).exp().sum())])

    def by_hand(x):
        s, t = coarse(torch.log_softmax(x[0], -1)), coarse(teacher[0])
        if beta in (0, 1):
            p, q = (t, s) if beta == 0 else (s, t)
            return 0.5 * (p.exp() * (p - q)).sum()
        m = torch.log(beta * t.exp() + (1 - beta) * s.exp())
        return 0.5 * (beta * (t.exp() * (t - m)).sum() + (1 - beta) * (s.exp() * (s - m)).sum())

    value, gradient = autograd(
        lambda x: jsd(select_logprobs(x, top), teacher.gather(1, top), WEIGHTS[:1], beta, "tail"), z
    )
    expected, exact = autograd(by_hand, z)
    assert value == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(gradient, exact, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_jsd_against_brute_force(beta):
    z, teacher = logits(3, 5), torch.log_softmax(logits(3, 5, seed=1), -1)

    def loss(x):
        return jsd(torch.log_softmax(x, -1), teacher, WEIGHTS, beta)

    expected = 0.0
    for n, w in enumerate(WEIGHTS.tolist()):
        s, t = torch.log_softmax(z[n], -1).tolist(), teacher[n].tolist()
        if beta in (0.0, 1.0):
            expected += w * (full_kl(t, s) if beta == 0 else full_kl(s, t))
        else:
            m = [math.log(beta * math.exp(a) + (1 - beta) * math.exp(b)) for a, b in zip(t, s)]
            expected += w * (beta * full_kl(t, m) + (1 - beta) * full_kl(s, m))
    value, gradient = autograd(loss, z)
    assert value == pytest.approx(expected)
    assert torch.allclose(gradient, numeric_gradient(loss, z), atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_absent_candidates_and_a_sure_teacher_stay_finite(beta):
    teacher = torch.tensor([[0.0, -torch.inf], [-1.0, -2.0], [-0.7, -torch.inf]], dtype=torch.float64)
    z = logits(3, 4)
    value, gradient = autograd(
        lambda x: jsd(torch.log_softmax(x, -1)[:, :2], teacher, WEIGHTS, beta, "tail"), z
    )
    assert math.isfinite(value) and gradient.isfinite().all()


def test_tail_of_both_sides_holds_all_the_rest():
    student, teacher = topk_support(
        torch.log(torch.tensor([[0.1, 0.2]])), torch.log(torch.tensor([[0.5, 0.4]])), "tail"
    )
    assert torch.allclose(student.exp(), torch.tensor([[0.1, 0.2, 0.7]]))
    assert torch.allclose(teacher.exp(), torch.tensor([[0.5, 0.4, 0.1]]))


def test_renormalized_support_of_one_candidate_is_refused():
    one = torch.zeros(3, 1)
    for loss in (
        lambda: forward_kl_topk(one, one, WEIGHTS, "renormalized"),
        lambda: jsd(one, one, WEIGHTS, 1.0, "renormalized"),
    ):
        with pytest.raises(ConfigError, match="exactly 0"):
            loss()


def test_unknown_support_and_beta_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="support"):
        topk_support(torch.zeros(1, 2), torch.zeros(1, 2), "all")
    with pytest.raises(ConfigError, match="beta"):
        jsd(torch.zeros(3, 2), torch.zeros(3, 2), WEIGHTS, 1.5)


@settings(max_examples=30, deadline=None)
@given(bad=st.sampled_from([math.nan, math.inf, -math.inf]), at=st.integers(0, 2))
def test_tokens_of_weight_zero_add_nothing_whatever_they_hold(bad, at):
    weights, teacher = WEIGHTS.clone(), torch.full((3,), -1.0, dtype=torch.float64)
    weights[at] = 0
    logp = torch.tensor([-1.5, -2.0, -0.5], dtype=torch.float64)
    clean = autograd(lambda x: sampled_reverse_kl(x, teacher, weights), logp)
    teacher[at] = bad
    value, gradient = autograd(lambda x: sampled_reverse_kl(x, teacher, weights), logp)
    assert value == clean[0] and torch.equal(gradient, clean[1])
    wide, topk = logits(3, 4), torch.log_softmax(logits(3, 4, seed=1), -1)
    topk[at] = bad
    for beta in (0.0, 0.5, 1.0):
        value, gradient = autograd(lambda x, b=beta: jsd(torch.log_softmax(x, -1), topk, weights, b), wide)
        assert math.isfinite(value) and gradient.isfinite().all() and not gradient[at].any()


def test_a_batch_of_weight_zero_still_reaches_every_parameter():
    value, gradient = autograd(
        lambda x: sampled_reverse_kl(x, torch.zeros(1), torch.zeros(1)), torch.tensor([-1.0])
    )
    assert value == 0 and gradient.tolist() == [0.0]


def test_select_logprobs_takes_one_or_several_ids():
    z = logits(2, 5)
    one = select_logprobs(z, torch.tensor([1, 4]), 0.5)
    several = select_logprobs(z, torch.tensor([[1, 0], [4, 2]]), 0.5)
    assert torch.equal(one, several[:, 0])
    assert select_logprobs(z.half(), torch.tensor([1, 4])).dtype == torch.float32
