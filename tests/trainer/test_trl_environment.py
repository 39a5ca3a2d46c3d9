"""TRL's own GRPO trainer plays an environment of this package through its tool calls."""

import json
import sys
from pathlib import Path

import pytest
from tiny_models import qwen3

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gym"))
from adapter_env import ID  # noqa: E402

from divopd_gym.adapters.trl import environment_factory, task_dataset  # noqa: E402

TEMPLATE = "chat_templates/qwen3.jinja"


def tokenizer():
    """Byte-level, with Qwen3's markers and TRL's copy of its template."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template = Path(trl.__file__).parent / TEMPLATE
    if not template.exists():
        pytest.skip("this version of TRL ships no Qwen3 template")
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=marks[0], eos_token=marks[2])
    fast.add_special_tokens({"additional_special_tokens": marks})
    # Qwen3's own tokenizer has these as plain added tokens, which decoding keeps.
    fast.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    fast.chat_template = template.read_text("utf-8")
    return fast


@pytest.mark.e2e
def test_grpo_plays_an_episode_by_tool_calls_and_its_reward_is_the_score(tmp_path):
    from trl import GRPOConfig, GRPOTrainer

    seen = []

    class Scripted(GRPOTrainer):
        """Generation says the words of the task, one a call; the second rollout waits instead."""

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            replies = []
            for number, ids in enumerate(prompt_ids):
                text = self.processing_class.decode(ids)
                seen.append(text)
                if "episode is over" in text:
                    said = "done"
                else:
                    words = [text.rpartition("Possible actions: ")[2].partition(";")[0], "wait"]
                    # Alone is the second one, which has not ended.
                    action = words[number if len(prompt_ids) == 2 else 1]
                    call = json.dumps({"name": "act", "arguments": {"action": action}})
                    said = f"<tool_call>\n{call}\n</tool_call>"
                replies.append(self.processing_class(said + "<|im_end|>")["input_ids"])
            return replies, [[-1.0] * len(reply) for reply in replies]

        def _calculate_rewards(self, *args, **kwargs):
            self.rewards = super()._calculate_rewards(*args, **kwargs)
            return self.rewards

    tokens = tokenizer()
    model = qwen3(positions=4096)
    model.resize_token_embeddings(len(tokens))
    trainer = Scripted(
        model=model,
        args=GRPOConfig(
            output_dir=str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=2000,
            max_tool_calling_iterations=4,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        processing_class=tokens,
        train_dataset=task_dataset(ID, limit=1),
        environment_factory=environment_factory(ID, {"max_turns": 4}),
    )
    trainer.train()
    assert any("Say a b." in text and "The action, written exactly" in text for text in seen)
    assert any("episode is over: success" in text for text in seen)
    assert sorted(trainer.rewards.flatten().tolist()) == [0.0, 1.0]
