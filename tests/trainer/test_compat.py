import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from divopd_gym.errors import ConfigError
from divopd_trainer.compat import compare_tokenizers

TEMPLATE = (
    "{% for m in messages %}{{ '<s> ' + m.role + ' ' + m.content + ' <e> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)
WORDS = ["<unk>", "<s>", "<e>", "<eos>", "system", "user", "assistant", "You", "act", "room", "vase", "look"]


def words(vocab=WORDS, template=TEMPLATE, eos="<e>"):
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocab)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens(["<s>", "<e>", "<eos>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, chat_template=template, eos_token=eos, unk_token="<unk>"
    )


def test_a_tokenizer_equals_itself():
    report = compare_tokenizers(words(), words())
    assert report.same_end_of_turn and report.same_prompt and report.differing_share == 0
    assert report.differences() == report.check() == [] and report.mask(np.arange(12)).all()


def test_other_end_of_turn_is_named_and_refused():
    other = TEMPLATE.replace(" <e> ", " <eos> ")
    report = compare_tokenizers(words(), words(template=other))
    assert (report.student_end, report.teacher_end) == ((2, "<e>"), (3, "<eos>"))
    with pytest.raises(ConfigError, match="'<e>'.*'<eos>'.*same chat template"):
        report.check()
    assert len(report.check(allow_other_end=True)) == 2


def test_other_template_is_reported_with_the_first_difference():
    report = compare_tokenizers(words(), words(template="{{ '<s> ' }}" + TEMPLATE))
    assert report.first_difference == 1 and not report.same_prompt
    assert "position 1" in report.check()[0]


def test_a_prompt_that_is_a_prefix_of_the_other_differs_where_it_ends():
    shorter = TEMPLATE.replace("'<s> assistant '", "'<s> '")
    report = compare_tokenizers(words(), words(template=shorter))
    assert report.first_difference == len(report.teacher_prompt) == len(report.student_prompt) - 1


def test_ids_that_mean_other_strings_are_masked_and_counted():
    teacher = words([*WORDS[:9], "vase", "room"])
    report = compare_tokenizers(words(), teacher)
    assert report.differing_share == pytest.approx(3 / 12)
    assert report.mask(np.array([[8, 9], [10, 11]])).tolist() == [[True, False], [False, False]]
    assert report.mask(np.array([-1, 12, 10**6])).tolist() == [False] * 3, "a padded embedding has more ids"
    with pytest.raises(ConfigError, match="25.0%.*teacher of the student's family"):
        report.check()
    assert "25.00%" in report.check(max_differing_share=0.3)[-1]


def test_extra_ids_of_the_teacher_do_not_matter():
    assert compare_tokenizers(words(), words([*WORDS, "drawer"])).differing_share == 0
