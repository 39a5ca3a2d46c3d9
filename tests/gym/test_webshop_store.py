"""Catalogue, sources, stores: loading rules, fingerprints, half-built indexes, sharing."""

import json
import multiprocessing

import pytest

from divopd_gym.envs.webshop import prepare as preparing
from divopd_gym.envs.webshop.prepare import get_store, index_folder, prepare
from divopd_gym.envs.webshop.products import NO_ATTRIBUTES, make_product, parse_prices, read_products
from divopd_gym.envs.webshop.sources import find_sources, read_array, read_object
from divopd_gym.errors import ConfigError, DataNotFoundError

from webshop_files import raw, write_catalogue  # isort: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    write_catalogue(data)
    return data


def record(**changes):
    from divopd_gym.envs.webshop.generated import generate_products

    return raw(next(generate_products(1))) | {"customization_options": {}} | changes


def test_bad_repeated_and_surplus_records_are_left_out_after_the_cut():
    records = [
        record(asin="nan"),
        record(asin="A" * 11),
        record(asin="A1"),
        record(asin="A1"),
        record(asin="A2"),
    ]
    assert [p.asin for p in read_products(records, {}, {})] == ["A1", "A2"]
    assert [p.asin for p in read_products(records, {}, {}, limit=4)] == ["A1"]


def test_options_are_cleaned_and_empty_groups_dropped():
    groups = {"Color": [{"value": " Ivory/White ", "image": "u"}], "Size": None}
    product = make_product(record(customization_options=groups))
    assert product.options == {"color": ["ivory | white"]} and product.images == {"ivory | white": "u"}
    assert product.attributes == list(NO_ATTRIBUTES)
    assert make_product(record(small_description="one text")).bullets == ["one text"]


@pytest.mark.parametrize(
    ("text", "prices"),
    [
        ("", [100.0]),
        (None, [100.0]),
        ("$1,234.50", [1234.5]),
        ("$5 - $7.5", [5.0, 7.5]),
        ("$1$2$3", [1.0, 2.0]),
    ],
)
def test_prices_are_read(text, prices):
    assert parse_prices(text) == prices


def test_unreadable_records_are_named():
    with pytest.raises(ConfigError, match="no number"):
        parse_prices("$1.2.3")
    broken = record()
    del broken["query"]
    with pytest.raises(ConfigError, match="has no query"):
        make_product(broken)
    with pytest.raises(ConfigError, match="asin None"):
        list(read_products([{}], {}, {}))


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
def test_files_are_read_piece_by_piece_at_any_chunk_size(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("divopd_gym.envs.webshop.sources._CHUNK", chunk)
    path = tmp_path / "x.json"
    array = [{"a": '["}', "b": [1, {"c": None}]}, {"ü": "\u2605"}]
    path.write_text(json.dumps(array, indent=2) + "\n")
    assert list(read_array(path)) == array
    entries = {"a": {"x": [1]}, 'b"': {}}
    path.write_text(json.dumps(entries))
    assert dict(read_object(path)) == entries
    path.write_text("{ }")
    assert dict(read_object(path)) == {}
    path.write_text("[\n]")
    assert list(read_array(path)) == []


@pytest.mark.parametrize("text", ["", "[", '[{"a": 1}', '[{"a": 1},', '[{"a"', "{}", "[1 2]"])
def test_a_broken_file_is_one_clear_error(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="fetch it again"):
        list(read_array(path))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataNotFoundError, match="items_shuffle"):
        find_sources(tmp_path)
    (tmp_path / "items_shuffle_1000.json").write_text("[]")
    with pytest.raises(DataNotFoundError, match="items_ins_v2_1000"):
        find_sources(tmp_path)


def test_a_catalogue_without_products_is_refused(tmp_path, folder):
    for name in ("items_shuffle_1000.json", "items_ins_v2_1000.json"):
        (folder / name).write_text("[]" if "shuffle" in name else "{}")
    with pytest.raises(ConfigError, match="no products"):
        get_store(folder)
    assert not list(index_folder(find_sources(folder)).parent.glob(".index-*-*"))


def test_a_store_is_built_once_and_shared_in_a_process(folder):
    one = get_store(folder)
    stamp = (index_folder(find_sources(folder)) / "meta.json").stat().st_mtime_ns
    assert get_store(folder) is one
    assert (index_folder(find_sources(folder)) / "meta.json").stat().st_mtime_ns == stamp
    assert len(one.catalogue) == 30 and len(one.goals("synthetic")) > 0 and len(one.goals("human")) > 0


def _search(folder, results):
    store = get_store(folder)
    results.put((store.catalogue.product(3).asin, store.engine.search("window curtain", 5)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_the_same_index(folder, method):
    store = get_store(folder)
    expected = (store.catalogue.product(3).asin, store.engine.search("window curtain", 5))
    context = multiprocessing.get_context(method)
    results = context.Queue()
    process = context.Process(target=_search, args=(folder, results), daemon=True)
    process.start()
    try:
        assert results.get(timeout=60) == expected
    finally:
        process.join(20)
        process.kill()


def test_an_index_of_another_catalogue_is_refused(folder):
    prepare(folder)
    write_catalogue(folder, seed=1)
    with pytest.raises(ConfigError, match="another catalogue.*rebuild=True"):
        get_store(folder)
    prepare(folder, rebuild=True)
    assert len(get_store(folder).catalogue) == 30


def test_touching_a_file_without_changing_it_is_no_change(folder):
    import os

    prepare(folder)
    os.utime(folder / "items_shuffle_1000.json", (1, 1))
    assert len(get_store(folder).catalogue) == 30


def test_a_number_of_products_has_an_index_of_its_own(folder):
    assert len(get_store(folder, num_products=7).catalogue) == 7
    assert len(get_store(folder).catalogue) == 30
    with pytest.raises(ConfigError, match="num_products"):
        get_store(folder, num_products=7, index_dir=index_folder(find_sources(folder)))


@pytest.mark.parametrize("name", ["meta.json", "docs.npy", "catalogue.sqlite"])
@pytest.mark.parametrize("harm", ["gone", "short"])
def test_a_half_built_index_is_one_clear_error_and_prepare_mends_it(folder, name, harm):
    path = prepare(folder) / name
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match="half built.*prepare"):
        get_store(folder)
    prepare(folder)
    assert len(get_store(folder).catalogue) == 30


def test_a_large_catalogue_is_not_indexed_without_being_asked(folder, monkeypatch):
    monkeypatch.setattr(preparing, "SMALL_BYTES", 100)
    with pytest.raises(DataNotFoundError, match="prepare"):
        get_store(folder)
    # The attribute file goes through a table on disk then, with the same result.
    told = []
    prepare(folder, lambda what, done, total: told.append((done, total)))
    large = get_store(folder)
    assert told[-1][0] == told[-1][1] and [d for d, _ in told[:-1]] == sorted(d for d, _ in told[:-1])
    monkeypatch.undo()
    assert large.catalogue.product(0).attributes != list(NO_ATTRIBUTES)


def test_without_a_place_to_write_a_small_index_lives_in_memory(folder, monkeypatch):
    blocked = folder / "blocked"
    blocked.write_text("a file where the cache should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    store = get_store(folder)
    assert store.folder is None and len(store.engine.search("curtain", 3)) == 3


def test_an_unfinished_build_leaves_nothing_behind(folder, monkeypatch):
    def fail(*args):
        raise RuntimeError("the disk is full")

    monkeypatch.setattr("divopd_gym.envs.webshop.store.Postings.save", fail)
    with pytest.raises(RuntimeError, match="the disk is full"):
        prepare(folder)
    place = index_folder(find_sources(folder))
    assert not place.exists()
    assert [path.name for path in place.parent.iterdir() if path.is_dir()] == []


def test_a_long_order_of_goals_is_written_down_and_read_back(folder, monkeypatch):
    plain = [goal.text for goal in get_store(folder).goals("synthetic")]
    monkeypatch.setattr("divopd_gym.envs.webshop.store._LONG_ORDER", 1)
    prepare(folder, rebuild=True)
    assert (index_folder(find_sources(folder)) / "order_synthetic.npy").is_file()
    assert [goal.text for goal in get_store(folder).goals("synthetic")] == plain
