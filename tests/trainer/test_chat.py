import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from divopd_gym.errors import ConfigError
from divopd_trainer.chat import ChatCodec

# As Qwen3 does it: reasoning is deleted from every reply before the last user message.
THINKING_TEMPLATE = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set text = m.content -%}
{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in text -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
INST_TEMPLATE = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- raise_exception('no system role') -}}
{%- elif m.role == 'user' -%}{{- '[INST] ' + m.content.strip() + ' [/INST]' -}}
{%- else -%}{{- m.content + eos_token -}}{%- endif -%}
{%- endfor -%}
"""


def tokenizer_of(
    template, specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"), **names
):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        ["You are in a room. go to desk 1\nuser\nassistant\n\n\n[INST] look [/INST]"] * 4,
        trainers.BpeTrainer(
            vocab_size=360, special_tokens=list(specials), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )  # fmt: skip
    names = names or {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template, **names)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(THINKING_TEMPLATE)


def test_three_turns_with_reasoning_keep_an_exact_prefix(tokenizer):
    codec = ChatCodec(tokenizer)
    ids = codec.start("Solve it.", "You are in a room.").tolist()
    replies = ["<think>desk?</think>\n\ngo to desk 1", "<think>look</think>look", "<think>x</think>go"]
    messages = [("system", "Solve it."), ("user", "You are in a room.")]
    for reply, user in zip(replies, ["At desk 1.", "Nothing.\n\n", "Done."]):
        response = codec.reply(reply).tolist()
        prompt = ids
        ids = ids + response
        ids += codec.extend(user, closed=codec.closes(response)).tolist()
        assert ids[: len(prompt) + len(response)] == prompt + response
        messages += [("assistant", reply), ("user", user)]
    text = tokenizer.decode(ids)
    assert all(reply in text for reply in replies)
    rendered = tokenizer.apply_chat_template(
        [dict(role=r, content=c) for r, c in messages], tokenize=False, add_generation_prompt=True
    )
    assert not any(reply in rendered for reply in replies[:2]), (
        "the template must rewrite the past, or this shows nothing"
    )


def test_without_reasoning_the_ids_are_those_of_the_whole_conversation(tokenizer):
    codec = ChatCodec(tokenizer)
    ids = (
        codec.start(None, "a room").tolist()
        + codec.reply("look").tolist()
        + codec.extend("a desk\n").tolist()
    )
    whole = tokenizer.apply_chat_template(
        [dict(role="user", content="a room"), dict(role="assistant", content="look"), dict(role="user", content="a desk\n")],
        tokenize=False, add_generation_prompt=True, enable_thinking=False,
    )  # fmt: skip
    empty = codec.encode("<think>\n\n</think>\n\n").tolist()
    at = len(codec.start(None, "a room"))
    assert ids[at - len(empty) : at] == empty
    assert ids[: at - len(empty)] + ids[at:] == codec.encode(whole).tolist()


def test_ids_never_reencoded(tokenizer):
    """Ids whose text would encode to other ids stay as the engine made them."""
    codec = ChatCodec(tokenizer)
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "room"]
    assert codec.encode("room").tolist() != letters
    ids = np.concatenate([codec.start(None, "a"), letters, codec.extend("b", closed=False)])
    at = len(codec.start(None, "a"))
    assert ids[at : at + 4].tolist() == letters


def test_end_of_turn_is_added_only_when_the_reply_lacks_it(tokenizer):
    codec = ChatCodec(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert codec.end_of_turn_id == end and codec.end_of_turn_ids == (end,)
    assert codec.closes([5, end]) and not codec.closes([5]) and not codec.closes([])
    assert codec.extend("x", closed=False).tolist() == [end, *codec.extend("x").tolist()]
    assert codec.extend("x")[0] != end


def test_eos_that_is_not_the_closing_token_also_stops():
    codec = ChatCodec(tokenizer_of(THINKING_TEMPLATE, eos_token="<|endoftext|>"))
    assert codec.end_of_turn_ids == (codec.end_of_turn_id, codec.tokenizer.eos_token_id)
    assert not codec.closes([codec.tokenizer.eos_token_id])


def test_template_without_system_role_that_strips_contents():
    tokenizer = tokenizer_of(INST_TEMPLATE, ("<s>", "</s>"), bos_token="<s>", eos_token="</s>")
    codec = ChatCodec(tokenizer)
    ids = codec.start("Sys.", "look ").tolist() + codec.reply("go").tolist() + codec.extend(" desk ").tolist()
    assert tokenizer.decode(ids) == "<s>[INST] Sys.\n\nlook [/INST]go</s>[INST] desk [/INST]"


def test_tokenizer_without_chat_template_is_refused():
    with pytest.raises(ConfigError, match="no chat template.*set tokenizer.chat_template"):
        ChatCodec(tokenizer_of(None))


def test_template_that_drops_replies_is_refused():
    with pytest.raises(ConfigError, match="verbatim"):
        ChatCodec(
            tokenizer_of(
                "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
            )
        )


def test_template_that_fails_on_plain_text_is_refused():
    with pytest.raises(ConfigError, match="plain text"):
        ChatCodec(tokenizer_of("{% for m in messages %}{{ m.content[0].text.strip() }}{% endfor %}"))
