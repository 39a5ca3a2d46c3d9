"""The picture of a comparison: mean success by update and by seconds of work, with a band for the two that matter most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from divopd_trainer.report.groups import Group, over_seeds
from divopd_trainer.report.svg import COLOURS

__all__ = ["draw"]

_BANDS = ("vanilla", "divopd")


def draw(groups: Sequence[Group], path: Path, title: str) -> None:
    """Two panels: all methods that merge prefixes by updates, all of them by generator, teacher and learner seconds.

    Args:
        groups: In the order of the legend.
        path: PNG file.
        title: Over both.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    colours = {"divopd": COLOURS[0], "vanilla": COLOURS[1], "vanilla-rows": "#5b616b"}
    rest = [group.label for group in groups if group.label not in colours]
    colours |= {label: COLOURS[2 + place % (len(COLOURS) - 2)] for place, label in enumerate(rest)}
    for group in groups:
        if group.label != "vanilla-rows":
            _line(left, group, lambda point: point.update, colours[group.label])
        _line(right, group, lambda point: point.end_to_end_s, colours[group.label])
    left.set(xlabel="updates", ylabel="strict success on held-out tasks")
    right.set(xlabel="CPU seconds of generator, teacher and learner")
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e8ec")
        axes.set_axisbelow(True)
        axes.set_xlim(left=0)
    left.set_ylim(bottom=0)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _line(axes, group: Group, of: Callable, colour: str) -> None:
    """Mean over the seeds, with the 95 % band of the mean where the group has one to show."""
    curve = over_seeds([[(of(point), point.rate) for point in run.evals] for run in group.runs], share=True)
    strong = group.label in _BANDS or group.label == "vanilla-rows"
    axes.plot(curve.x, curve.y, color=colour, label=group.label, linewidth=2.4 if strong else 1.3)
    if group.label in _BANDS and curve.low is not None:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.13, linewidth=0)
