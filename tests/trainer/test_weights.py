"""Policy files: whole or absent, tied weights once, nothing loaded that does not fit."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import logprobs, prompt, qwen3

from divopd_trainer.engines.weights import WeightsError, load_policy, read_policy, write_policy


def same(model, other):
    pairs = zip(model.state_dict().values(), other.state_dict().values())
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("names", ["named_parameters", "state_dict"])
def test_written_weights_come_back_exactly(tied, names, tmp_path):
    source, target = qwen3(1, tied), qwen3(2, tied)
    assert not same(source, target)
    path = write_policy(getattr(source, names)(), tmp_path, 3)
    assert load_policy(target, path) == len(list(target.parameters()))
    assert same(source, target)
    assert (target.lm_head.weight is target.model.embed_tokens.weight) is tied


def test_tied_weights_are_written_once(tmp_path):
    model = qwen3()
    stored = load_file(write_policy(model.state_dict(), tmp_path, 1))
    assert len(stored) == len(list(model.parameters()))


def test_weights_from_an_iterator_are_not_taken_for_tied_when_memory_is_used_again(tmp_path):
    source = qwen3(1)

    def gathered():
        for name, parameter in source.named_parameters():
            # Freed before the next is made, as gathered shards are; equal shapes then get equal addresses.
            yield name, parameter.detach().clone()

    target = qwen3(2)
    load_policy(target, write_policy(gathered(), tmp_path, 1))
    assert same(source, target)


def test_fused_views_are_written_like_any_other_weights(tmp_path):
    source, target = qwen3(1), qwen3(2)
    attention = source.model.layers[0].self_attn
    fused = torch.cat([attention.q_proj.weight.data, attention.k_proj.weight.data])
    attention.q_proj.weight.data, attention.k_proj.weight.data = fused[:32], fused[32:]
    load_policy(target, write_policy(source.named_parameters(), tmp_path, 1))
    assert same(source, target)


def test_names_that_wrappers_change_are_recognised(tmp_path):
    source, target = qwen3(1), qwen3(2)
    wrapped = {f"module._orig_mod.{n}": p for n, p in source.named_parameters()}
    load_policy(target, write_policy(wrapped, tmp_path, 1))
    assert same(source, target)


def test_other_precision_is_converted(tmp_path):
    source, target = qwen3(1), qwen3(2)
    path = write_policy(source.named_parameters(), tmp_path, 1, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(path).values()} == {torch.bfloat16}
    load_policy(target, path)
    assert target.model.norm.weight.dtype == torch.float32
    ids = prompt(1, 20)
    assert abs(logprobs(source, ids) - logprobs(target, ids)).max() < 0.5


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    def broken():
        yield "a", torch.zeros(2)
        raise RuntimeError("the learner died")

    with pytest.raises(RuntimeError):
        write_policy(broken(), tmp_path, 1)
    # A name that the format has no room for fails inside the writer.
    with pytest.raises(Exception, match=".*"):
        write_policy({"a": torch.zeros(2).to_sparse()}, tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 missing \(model.norm.weight\)"),
        (lambda t: t.update(extra=torch.zeros(1)), r"1 unknown \(extra\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"given \(31,\), expected \(32,\)"),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
            "are one tensor in this model",
        ),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change, message, tmp_path):
    tensors = {n: p.detach().clone() for n, p in qwen3(1).named_parameters()}
    change(tensors)
    target, untouched = qwen3(2), qwen3(2)
    with pytest.raises(WeightsError, match=message):
        load_policy(target, tensors)
    assert same(target, untouched)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(WeightsError, match="No safetensors file"):
        read_policy(tmp_path)
    with pytest.raises(WeightsError, match="gone.safetensors cannot be read"):
        read_policy(tmp_path / "gone.safetensors")
    (tmp_path / "half.safetensors").write_bytes(b"half a file")
    with pytest.raises(WeightsError, match="half.safetensors cannot be read"):
        read_policy(tmp_path / "half.safetensors")


def test_saved_model_directory_is_a_source(tmp_path):
    source, target = qwen3(1), qwen3(2)
    source.save_pretrained(tmp_path)
    load_policy(target, tmp_path)
    assert same(source, target)
    save_file({"stray": torch.zeros(1)}, tmp_path / "extra.safetensors")
    with pytest.raises(WeightsError, match="stray"):
        load_policy(target, tmp_path)
