"""Distillation from a script: a trainer of your own on the tiny setting, and what came of it.

    python examples/quickstart.py                                        # five minutes on one CPU core
    python examples/quickstart.py --updates 5 --run_dir runs/quick       # any setting of `divopd train`

The trainer here limits how much one token may say: advantages beyond `limit` nats are cut. Every other part (composer,
weighting, horizon, ...) can be replaced in the same way, or by name in the settings.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from divopd_trainer import DivOPDTrainer, run
from divopd_trainer.config_files import parse_config
from divopd_trainer.losses import advantage_loss
from divopd_trainer.metrics_log import read_metrics
from divopd_trainer.report import write_report

ROOT = Path(__file__).resolve().parents[1]


class LimitedTrainer(DivOPDTrainer):
    """DivOPD with the advantage of a token cut at `limit` nats on either side."""

    limit = 5.0

    def token_loss(self, logp: torch.Tensor, micro) -> torch.Tensor:
        """The loss of a micro-batch's tokens; weights already add up over the whole batch."""
        advantage = self.advantage(logp.detach(), micro).clamp(-self.limit, self.limit)
        return advantage_loss(logp, advantage, micro.weights, micro.rewards)


def main(argv: list[str]) -> None:
    """Train, then show the evaluations."""
    tiny = ROOT / "examples" / "tiny"
    # The command line wins over the file, and later options over earlier ones.
    models = ["--model", str(tiny / "models" / "student"), "--teacher", str(tiny / "models" / "teacher")]
    config = parse_config(
        ["--config", str(tiny / "divopd.yaml"), *models, "--run_dir", "runs/quickstart", *argv]
    )
    result = run(config, trainer_class=LimitedTrainer)
    for line in read_metrics(config.run_dir, ["eval"]):
        low, high = 100 * line["success_low"], 100 * line["success_high"]
        print(
            f"policy version {line['policy_version']:>3}: strict success {line['success_rate']:.1%} ({low:.0f}-{high:.0f})"
        )
    print(
        f"{result.update} updates; student: {result.final_model}; report: {write_report([config.run_dir]).html}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
