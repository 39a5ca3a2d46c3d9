"""A group is sent whole: all its episodes or none, compared with each other."""

import math

import pytest

from divopd_trainer.explorer.groups import Finished, Groups, group_advantages
from divopd_trainer.explorer.tasks import Ticket
from divopd_trainer.turns import Rollout, Segment, make_turn


def finished(place, reward=0.0, epoch=0, failed=False):
    if failed:
        return Finished(Ticket(epoch, place, "a", place))
    segment = Segment(place, 0, [1, 2, 3])
    turn = make_turn(
        rollout_id=place,
        index=0,
        segment=segment,
        start=1,
        end=3,
        student_logprobs=[-1, -1],
        teacher_logprobs=[-1, -2],
    )
    return Finished(Ticket(epoch, place, "a", place), Rollout(place, turns=[turn], reward=reward), True, 1)


def places(members):
    return [member.ticket.place for member in members]


def test_alone_an_episode_is_sent_at_once_without_an_advantage():
    mine = finished(7)
    assert Groups(1).add(mine) == [mine]
    assert "group_advantage" not in mine.rollout.turns[0].info


def test_a_group_is_held_until_its_last_member_and_sent_in_the_order_of_attempts():
    groups = Groups(3)
    assert groups.add(finished(5)) == [] and groups.add(finished(3)) == []
    assert groups.add(finished(0)) == []  # of another task
    assert places(groups.add(finished(4))) == [3, 4, 5]
    assert places(groups.add(finished(1)) + groups.add(finished(2))) == [0, 1, 2]


def test_the_same_places_of_two_epochs_are_two_groups():
    groups = Groups(2)
    assert groups.add(finished(0, epoch=0)) == groups.add(finished(1, epoch=1)) == []
    assert places(groups.add(finished(1, epoch=0))) == [0, 1]


def test_advantages_by_hand():
    groups = Groups(4)
    members = [finished(place, reward) for place, reward in enumerate((1.0, 0.0, 0.0, 1.0))]
    whole = [groups.add(member) for member in members][-1]
    # Mean 1/2, standard deviation 1/2.
    assert [m.rollout.turns[0].info["group_advantage"] for m in whole] == [1.0, -1.0, -1.0, 1.0]
    assert [m.rollout.meta["group_advantage"] for m in whole] == [1.0, -1.0, -1.0, 1.0]
    # Mean 1, deviation sqrt(2/3).
    assert group_advantages([0.0, 1.0, 2.0]) == pytest.approx([-math.sqrt(1.5), 0.0, math.sqrt(1.5)])


def test_equal_rewards_teach_nothing():
    assert group_advantages([0.3, 0.3, 0.3]) == [0.0] * 3
    assert group_advantages([]) == []


def test_a_failed_member_completes_its_group_and_takes_no_part_in_the_comparison():
    groups = Groups(3)
    groups.add(finished(0, 1.0))
    groups.add(finished(1, failed=True))
    whole = groups.add(finished(2, 0.0))
    assert [m.rollout is None for m in whole] == [False, True, False]
    assert [m.rollout.meta["group_advantage"] for m in whole if m.rollout] == [1.0, -1.0]


def test_a_group_of_failures_is_sent_on_too_so_that_its_tickets_are_finished():
    groups = Groups(2)
    groups.add(finished(0, failed=True))
    assert places(groups.add(finished(1, failed=True))) == [0, 1]


def test_members_sent_before_a_restart_are_not_waited_for():
    gone = {(0, 0), (0, 2)}
    groups = Groups(4, lambda epoch, place: (epoch, place) in gone)
    assert groups.add(finished(3, 1.0)) == []
    whole = groups.add(finished(1, 0.0))
    assert places(whole) == [1, 3]
    assert [m.rollout.meta["group_advantage"] for m in whole] == [-1.0, 1.0]
