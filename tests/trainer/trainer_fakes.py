"""A trainer whose explorer needs no process, for tests."""

import torch
from learner_fakes import FakeExplorer, config, random_rollout

from divopd_trainer.metrics_log import read_metrics
from divopd_trainer.trainer import DivOPDTrainer


def build(
    tmp_path, student, play=random_rollout, *, explorer=None, limit=None, kind=DivOPDTrainer, **changes
):
    changes.setdefault("learner_threads", 1)
    make = explorer or (lambda state, path: FakeExplorer(play, limit=limit, state=state))
    return kind(config(tmp_path, student, **changes), explorer=make)


def lines(tmp_path, kind="train"):
    return read_metrics(tmp_path / "run", [kind])


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
