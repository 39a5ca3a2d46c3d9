import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divopd_gym.errors import ConfigError
from divopd_trainer.losses import forward_kl_topk, jsd, sampled_reverse_kl, select_logprobs, topk_support

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
