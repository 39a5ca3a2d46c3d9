"""The terminal view shows what the metric lines say, with and without a terminal."""

import io

from divopd_trainer.progress import LiveProgress, PlainProgress, SilentProgress, make_progress

LINE = {
    "update": 3, "loss": 0.5, "kl_per_token": 0.1234, "pool": 17, "unread": 5, "staleness": {"0": 1, "2": 3}, "dropped_stale": 2,
    "effective_rollouts": 11.5, "rollouts": 14, "learner_s": 1.5, "wait_s": 0.5, "forwarded_tokens": 4000,
}  # fmt: skip
EVALUATION = {"update": 2, "success_rate": 0.5, "success_low": 0.4, "success_high": 0.6, "episodes": 100}


def play(view):
    view.explorer({"success_rate": 0.25})
    view.waiting(3, 64)
    view.train(LINE)
    view.evaluation(EVALUATION)
    view.note("[bold]a note")
    view.close()


def test_plain_lines_hold_the_figures():
    stream = io.StringIO()
    play(PlainProgress(10, stream))
    text = stream.getvalue()
    assert "update 3/10" in text and "25% of recent episodes" in text and "0.1234" in text
    assert "17 turns, 5 unread" in text and "1.50 updates, 2 dropped" in text and "2,000 learner" in text
    assert "evaluation of update 2: 50.0% success [40.0%, 60.0%], 100 episodes" in text
    assert "[bold]a note" in text


def test_plain_updates_are_thinned_but_the_first_and_the_last_are_shown():
    stream = io.StringIO()
    view = PlainProgress(9, stream, every_s=1e9)
    for update in range(1, 10):
        view.train(LINE | {"update": update})
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["1/9", "9/9"]


def test_the_live_view_draws_the_same_figures():
    stream = io.StringIO()
    play(LiveProgress(10, stream))
    text = stream.getvalue()
    assert (
        "update 3/10" in text
        and "2,000 learner" in text
        and "50.0% success" in text
        and "[bold]a note" in text
    )


def test_a_pipe_gets_plain_lines_and_none_is_silent():
    assert type(make_progress("auto", 1, io.StringIO())) is PlainProgress
    assert type(make_progress("live", 1, io.StringIO())) is LiveProgress
    assert type(make_progress("none", 1)) is SilentProgress
