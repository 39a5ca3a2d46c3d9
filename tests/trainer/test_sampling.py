"""Seeded sampling: right distribution, exact log-probs, independent of the batch."""

import numpy as np
import pytest
import torch

from divopd_trainer.engines.sampling import extra_uniforms, sample, uniform_stream


def draw(logits, temperature, uniforms, greedy=None):
    rows = len(uniforms)
    logits = torch.as_tensor(logits, dtype=torch.float32).expand(rows, -1)
    heat = torch.full((rows,), float(temperature))
    flags = None if greedy is None else torch.full((rows,), greedy)
    return sample(logits, heat, torch.as_tensor(uniforms, dtype=torch.float64), flags)


def test_stream_is_fixed_by_the_seed_and_longer_ones_begin_alike():
    assert np.array_equal(uniform_stream(7, 20)[:5], uniform_stream(7, 5))
    assert not np.array_equal(uniform_stream(7, 5), uniform_stream(8, 5))
    assert np.array_equal(uniform_stream(-1, 3), uniform_stream(2**128 - 1, 3))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature):
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    ids, _ = draw(logits, temperature, uniform_stream(1, 20_000))
    found = np.bincount(ids.numpy(), minlength=5) / 20_000
    expected = torch.softmax(logits / temperature, -1).numpy()
    assert np.abs(found - expected).max() < 0.015


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_the_sampled_distribution(temperature):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3
    ids, logprobs = draw(logits, temperature, uniform_stream(2, 64))
    expected = torch.log_softmax(logits / temperature, -1)[ids]
    assert torch.allclose(logprobs, expected, atol=1e-6) and logprobs.dtype == torch.float32


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    ends = [0.0, np.nextafter(0.5, 0), 0.5, np.nextafter(1, 0)]
    ids, _ = draw(logits, 1.0, np.array(ends))
    assert ids.tolist() == [1, 1, 3, 3]


def test_greedy_takes_the_most_likely_and_reports_its_logprob_at_the_temperature():
    logits = torch.tensor([0.0, 3.0, 1.0])
    ids, logprobs = draw(logits, 0.5, np.array([0.999]), greedy=True)
    assert ids.tolist() == [1]
    assert float(logprobs[0]) == pytest.approx(float(torch.log_softmax(logits / 0.5, -1)[1]), abs=1e-6)


def test_a_row_is_drawn_alike_whatever_rows_stand_beside_it():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    heat, numbers = torch.linspace(0.5, 2, 6), torch.from_numpy(uniform_stream(4, 6))
    together = sample(logits, heat, numbers)
    for row in range(6):
        part = slice(row, row + 1)
        alone = sample(logits[part], heat[part], numbers[part])
        assert int(alone[0][0]) == int(together[0][row])
        assert float(alone[1][0]) == pytest.approx(float(together[1][row]), abs=1e-6)


def test_several_draws_of_a_row_are_independent_and_each_follows_the_softmax():
    logits = torch.tensor([0.0, 1.0, -1.0])
    numbers = torch.from_numpy(extra_uniforms(3, 20_000, 2))
    ids, logprobs = sample(logits.expand(20_000, -1), torch.full((20_000,), 0.7), numbers)
    p = torch.softmax(logits / 0.7, -1).numpy()
    joint = np.bincount((ids[:, 0] * 3 + ids[:, 1]).numpy(), minlength=9).reshape(3, 3) / 20_000
    assert np.abs(joint - np.outer(p, p)).max() < 0.015
    assert torch.allclose(logprobs.exp(), torch.from_numpy(p)[ids], atol=1e-6)


def test_the_first_of_several_draws_is_the_one_that_is_drawn_alone():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    heat, own = torch.ones(5), torch.from_numpy(uniform_stream(1, 5))
    both = torch.cat([own[:, None], torch.from_numpy(extra_uniforms(1, 5, 3))], 1)
    for greedy in (None, torch.tensor([True, False, True, False, False])):
        alone, several = sample(logits, heat, own, greedy), sample(logits, heat, both, greedy)
        assert torch.equal(alone[0], several[0][:, 0]) and torch.equal(alone[1], several[1][:, 0])


def test_numbers_for_extra_draws_are_fixed_by_the_seed_and_none_of_the_streams_own():
    numbers = extra_uniforms(7, 20, 4)
    assert np.array_equal(numbers[:5], extra_uniforms(7, 5, 4))
    assert not np.isin(numbers, uniform_stream(7, 1000)).any()
