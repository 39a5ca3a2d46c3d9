import itertools

from hypothesis import given
from hypothesis import strategies as st

from divopd_trainer.seeds import derive_seed, episode_seed, request_seed


def test_every_request_has_a_seed_of_its_own_and_a_replay_the_same():
    """Unique over run seed, task, attempt and turn: replicas cannot emit identical text."""
    wanted = list(itertools.product(range(3), [f"task-{i}" for i in range(20)], range(4), range(30)))
    seeds = [request_seed(*key) for key in wanted]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [request_seed(*key) for key in wanted]
    assert all(0 <= s < 2**63 for s in seeds)


def test_seeds_stay_what_they_are_between_versions():
    assert request_seed(0, "a/b", 1, 2) == 642614004709661820
    assert episode_seed(0, "a/b", 1) == 1653042663


def test_episode_seeds_fit_every_simulator():
    seeds = [episode_seed(0, "t", i) for i in range(1000)]
    assert len(set(seeds)) == 1000 and max(seeds) < 2**31


parts = st.lists(st.one_of(st.integers(-(10**6), 10**6), st.text(max_size=4)), max_size=4)


@given(parts, parts)
def test_other_parts_give_another_seed(a, b):
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]
    assert (derive_seed(*a) == derive_seed(*b)) == same
