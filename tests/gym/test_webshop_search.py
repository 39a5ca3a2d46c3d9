"""Analysis and search of WebShop: tokens, stems, scores, ties, pruning."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divopd_gym.envs.webshop import analysis, search
from divopd_gym.envs.webshop.analysis import analyse, words
from divopd_gym.envs.webshop.porter import porter_stem
from divopd_gym.envs.webshop.postings import LENGTHS, Postings, PostingsBuilder
from divopd_gym.envs.webshop.search import SearchEngine
from divopd_gym.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5.5 bar.com u.s.a 12,000 foo_bar don't", ["5.5", "bar.com", "u.s.a", "12,000", "foo_bar", "don't"]),
        ("T-shirt 8/10 a|b", ["T", "shirt", "8", "10", "a", "b"]),
        ("size:M 1,a 1.a a.1", ["size:M", "1", "a", "1", "a", "a", "1"]),
        ("★ Best ★", ["★", "Best", "★"]),
        ("❤️ 👨‍💼 🇩🇪", ["❤️", "👨‍💼", "🇩🇪"]),
        ("中国茶", ["中", "国", "茶"]),
        ("ひらカタカナ", ["ひ", "ら", "カタカナ"]),
        ("한국어 שלום", ["한국어", "שלום"]),
        ("crème brûlée", ["crème", "brûlée"]),
        ("brand® x™", ["brand", "®", "x", "™"]),
        ('28" x 28"', ["28", "x", "28"]),
        ("__a__ _ ''", ["__a__"]),
        ("", []),
    ],
)
def test_words_are_those_of_unicode_word_boundaries(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize(
    ("word", "stem"),
    [
        ("us", "us"),
        ("s", "s"),
        ("possibly", "possibl"),
        ("analogy", "analog"),
        ("caresses", "caress"),
        ("ponies", "poni"),
        ("agreed", "agre"),
        ("hopping", "hop"),
        ("falling", "fall"),
        ("filing", "file"),
        ("happy", "happi"),
        ("sky", "sky"),
        ("relational", "relat"),
        ("adoption", "adopt"),
        ("controlling", "control"),
        ("electricity", "electr"),
    ],
)
def test_stems_are_porters(word, stem):
    assert porter_stem(word) == stem


def test_possessives_and_stop_words_are_removed():
    assert analyse("The women's dresses AND men’s shoes") == ["women", "dress", "men", "shoe"]


def test_long_words_are_cut_into_pieces():
    assert [len(word) for word in words("a" * 600)] == [255, 255, 90]


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(max_codepoint=127), max_size=60))
def test_the_short_grammar_for_ascii_agrees_with_the_full_one(text):
    assert analysis._ASCII.findall(text) == analysis._FULL.findall(text)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_any_text_can_be_analysed(text):
    assert all(isinstance(term, str) for term in analyse(text))


def test_lengths_are_exact_to_forty_then_coarse():
    assert LENGTHS[:41].tolist() == list(range(41))
    assert LENGTHS[np.searchsorted(LENGTHS, 107, side="right") - 1] == 104


def build(texts, asins=None):
    builder = PostingsBuilder()
    for text in texts:
        builder.add(text)
    asins = asins or [f"B{number:09d}" for number in range(len(texts))]
    return SearchEngine(builder.finish(asins), builder.terms.get)


def test_equal_scores_rank_by_asin():
    engine = build(["red shoe", "red shoe", "red shoe"], ["C", "A", "B"])
    assert [row for row, _ in engine.search("red")] == [1, 2, 0]


def test_repeated_query_words_count_more():
    engine = build(["apple", "pear", "plum"])
    (_, once), (_, twice) = engine.search("apple")[0], engine.search("apple apple")[0]
    assert twice == pytest.approx(2 * once)


def test_unknown_and_empty_queries_find_nothing():
    engine = build(["apple"])
    assert engine.search("") == engine.search("zebra") == engine.search("the of and") == []


def test_documents_without_words_and_empty_catalogues_are_fine():
    assert [row for row, _ in build(["", "apple", "..."]).search("apple")] == [1]
    assert build(["", ""]).search("apple") == []


def test_the_compiled_loop_changes_no_result(monkeypatch):
    pytest.importorskip("numba")
    rng = random.Random(5)
    vocabulary = [f"w{number}" for number in range(60)]
    weights = [1 / (1 + number) for number in range(60)]
    texts = [" ".join(rng.choices(vocabulary, weights, k=rng.randint(1, 12))) for _ in range(800)]
    plain = build(texts)
    monkeypatch.setattr(search, "_FEW", 0)
    monkeypatch.setattr("divopd_gym.envs.webshop.search._STRETCH", 64)
    compiled = build(texts)
    for _ in range(300):
        query, k = " ".join(rng.choices(vocabulary, k=rng.randint(1, 9))), rng.choice((1, 7, 50, 900))
        assert compiled.search(query, k) == plain.search(query, k)
    assert compiled.search("zebra") == []


def test_without_the_compiled_loop_large_catalogues_are_searched_all_the_same(monkeypatch):
    monkeypatch.setattr(search, "_FEW", 0)
    monkeypatch.setattr(search, "_compiled", lambda: None)
    assert [row for row, _ in build(["red shoe", "shoe", "hat"]).search("shoe")] == [1, 0]


def test_an_index_is_the_same_after_saving(tmp_path):
    builder = PostingsBuilder(tmp_path)
    for text in ("red shoe", "blue shoe", ""):
        builder.add(text)
    made = builder.finish(["B", "A", "C"])
    made.save(tmp_path)
    mapped = Postings.load(tmp_path)
    assert isinstance(mapped.docs, np.memmap)
    for name in Postings.names():
        assert np.array_equal(getattr(made, name), getattr(mapped, name))


def test_blocks_and_single_documents_give_one_index(monkeypatch):
    monkeypatch.setattr("divopd_gym.envs.webshop.postings._BLOCK", 3)
    one, two = PostingsBuilder(), PostingsBuilder()
    for ids in ([0, 1, 1], [2], [0, 2]):
        one.add_ids(ids)
    two.add_block(np.array([0, 1, 2]), np.array([0, 0, 1]), np.array([1, 2, 1]), [3, 1])
    two.add_block(np.array([0, 2]), np.array([2, 2]), np.array([1, 1]), [2])
    made, other = one.finish(["c", "b", "a"]), two.finish(["c", "b", "a"])
    for name in Postings.names():
        assert np.array_equal(getattr(made, name), getattr(other, name)), name


def test_a_missing_asin_is_refused():
    builder = PostingsBuilder()
    builder.add("apple")
    with pytest.raises(ConfigError, match="one each"):
        builder.finish([])
