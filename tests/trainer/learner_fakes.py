"""A tiny student on disk and explorers that need no process, for tests of the learner's side."""

import queue
from collections import deque

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from divopd_trainer.config import DivOPDConfig
from divopd_trainer.explorer.messages import Evaluate, ExplorerState, Heartbeat, PoolStatus, Ready, SetPolicy
from divopd_trainer.turns import Rollout, Segment, make_turn

VOCAB = 64


def save_student(path, seed=0, vocab=VOCAB):
    """Write a 2-layer Qwen3 of 32 wide with its tokenizer; returns the path as text."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    words = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, vocab)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}{% endif %}"
    )
    tokenizer.save_pretrained(path)
    return str(path)


def config(tmp_path, student, **changes):
    """Settings of a run of a few updates on a CPU."""
    values = {
        "model": student,
        "teacher": student,
        "run_dir": str(tmp_path / "run"),
        "updates": 3,
        "batch_rows": 4,
        "cap": 2,
        "learning_rate": 1e-2,
        "eval_at_start": False,
        "eval_at_end": False,
        "eval_every": 0,
        "save_every": 0,
        "max_tokens": 8,
        "max_model_len": 128,
        "use_cpu": True,
        "progress": "none",
        "heartbeat_stale_after_s": 5.0,
    }
    return DivOPDConfig(**{**values, **changes})


class FakeExplorer:
    """Makes rollouts on demand, inside the trainer's process.

    Args:
        play: ``play(explorer, rollout_id) -> Rollout``.
        limit: Rollouts after which it has no more; None = without end.
        state: As `ExplorerState.to_dict`.
        ahead: Rollouts made for each request of the learner.
    """

    def __init__(self, play, limit=None, state=None, ahead=2):
        self.play, self.limit, self.ahead = play, limit, ahead
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.eval_results, self.failures = queue.Queue(), deque()
        self.ready = self.heartbeat = None
        self.restarts = 0
        self.loaded_version = -1
        self.model_version = None
        self.next_rollout_id = state["next_rollout_id"] if state else 0
        self.sent, self.stopped = [], False
        self.error = None
        self._requests = 0

    @property
    def exhausted(self):
        return self.limit is not None and self.next_rollout_id >= self.limit

    def start(self):
        self.ready = Ready({}, {})

    def stop(self, grace_s=0.0):
        self.stopped = True

    def update_model_version(self, version):
        self.model_version = version

    def check_health(self, stale_after_s):
        if self.error is not None:
            raise self.error

    def new_request_id(self):
        self._requests += 1
        return self._requests

    def state(self):
        return ExplorerState(schedule=None, next_rollout_id=self.next_rollout_id)

    def send(self, message):
        self.sent.append(message)
        if isinstance(message, SetPolicy):
            self.loaded_version = message.version
        if isinstance(message, PoolStatus) and message.wanted:
            for _ in range(self.ahead):
                self.make()
            self.heartbeat = Heartbeat({"turns": float(self.next_rollout_id)}, {})
        if isinstance(message, Evaluate):
            self.evaluated(message)

    def evaluated(self, message):
        pass

    def make(self):
        if not self.exhausted:
            rollout = self.play(self, self.next_rollout_id)
            self.next_rollout_id += 1
            self.rollout_buffer.put(rollout)


def random_rollout(explorer, rollout_id, *, turns=3, teacher=None, seed=7):
    """An accumulate-history rollout of random ids; ``teacher(ids, start, end)`` gives its log-probs."""
    rng = np.random.default_rng([seed, rollout_id])
    segment = Segment(rollout_id)
    spans = []
    for _ in range(turns):
        segment.append(rng.integers(2, VOCAB, 5))
        spans.append(segment.append(rng.integers(2, VOCAB, rng.integers(1, 4))))
    version = max(explorer.loaded_version, 0) if explorer is not None else 0
    made = []
    for index, (start, end) in enumerate(spans):
        logprobs = teacher(segment.token_ids, start, end) if teacher else -3.0 - rng.random(end - start)
        made.append(
            make_turn(
                rollout_id=rollout_id,
                index=index,
                segment=segment,
                start=start,
                end=end,
                student_logprobs=np.full(end - start, -4.0),
                teacher_logprobs=logprobs,
                policy_version=version,
            )
        )
    return Rollout(rollout_id, task=f"task-{rollout_id}", turns=made, turns_played=turns, done=True)
