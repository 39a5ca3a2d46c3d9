import hashlib
import io
import json
import re
import shutil
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from divopd_gym.data_check import OFFICIAL_COUNTS, TASK_TYPES
from divopd_gym.download import RECORD_NAME, alfworld_urls, check_alfworld, download_alfworld
from divopd_gym.errors import ConfigError, DataNotFoundError
from divopd_gym.transfer import fetch

SPLITS = ("train", "valid_train", "valid_seen", "valid_unseen")
CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def server():
    """A file server whose behaviour each test sets: see `plan`."""
    plan = SimpleNamespace(
        content=CONTENT, etag='"one"', ranges=True, cut_after=None, status=None, seen=[], sent=[], url=""
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            plan.seen.append(dict(self.headers))
            if plan.status:
                return self.send_error(plan.status.pop(0) if isinstance(plan.status, list) else plan.status)
            start, total = 0, len(plan.content)
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if asked and plan.ranges and self.headers.get("If-Range", plan.etag) == plan.etag:
                start = int(asked[1])
                if start >= total:
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{total}")
                    self.end_headers()
                    return None
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(total - start))
            self.send_header("ETag", plan.etag)
            self.end_headers()
            body = plan.content[start:]
            if plan.cut_after is not None:
                body = body[: plan.cut_after]
            plan.sent.append(len(body))  # before the bytes: a client may be done with them sooner
            self.wfile.write(body)
            self.close_connection = True
            return None

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    plan.url = f"http://127.0.0.1:{http.server_port}/games.zip"
    yield plan
    http.shutdown()
    http.server_close()


def get(plan, target, **options):
    return fetch(plan.url, target, **{"pause_s": 0.001, "timeout_s": 10, **options})


def test_a_file_arrives_whole_with_its_digest(server, tmp_path):
    reports = []
    fetched = get(server, tmp_path / "f", report=lambda *r: reports.append(r))
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert fetched.sha256 == hashlib.sha256(CONTENT).hexdigest()
    assert fetched.size == len(CONTENT)
    assert reports[-1] == (len(CONTENT), len(CONTENT))
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_an_interrupted_transfer_goes_on_where_it_stopped(server, tmp_path):
    server.cut_after = 300_000
    fetched = get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert sum(server.sent) == len(CONTENT)
    assert len(server.sent) == -(-len(CONTENT) // 300_000)
    assert fetched.resumed_at == 300_000 * (len(server.sent) - 1)


def test_a_later_call_goes_on_where_an_earlier_one_was_killed(server, tmp_path):
    def killed(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(server, tmp_path / "f", report=killed)
    kept = (tmp_path / "f.part").stat().st_size
    assert 0 < kept < len(CONTENT)
    assert not (tmp_path / "f").exists()
    assert get(server, tmp_path / "f").resumed_at == kept
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert server.seen[-1]["Range"] == f"bytes={kept}-"


def test_a_file_that_changed_meanwhile_is_fetched_anew_not_sewn_together(server, tmp_path):
    (tmp_path / "f.part").write_bytes(b"old" * 1000)
    (tmp_path / "f.part.json").write_text(
        json.dumps({"url": server.url, "validator": '"zero"', "total": 9000})
    )
    assert get(server, tmp_path / "f").resumed_at == 0
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_remains_of_another_address_are_not_used(server, tmp_path):
    (tmp_path / "f.part").write_bytes(b"other")
    (tmp_path / "f.part.json").write_text(json.dumps({"url": "http://elsewhere/f"}))
    get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_server_without_ranges_is_asked_from_the_start(server, tmp_path):
    server.ranges = False
    server.cut_after = 300_000
    with pytest.raises(DataNotFoundError, match="300,000 of"):
        get(server, tmp_path / "f", tries=2)
    server.cut_after = None
    get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_part_that_is_whole_already_is_taken_as_it_is(server, tmp_path):
    (tmp_path / "f.part").write_bytes(CONTENT)
    (tmp_path / "f.part.json").write_text(
        json.dumps({"url": server.url, "validator": '"one"', "total": len(CONTENT)})
    )
    get(server, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert server.sent == []


def test_passing_failures_of_the_server_are_retried_and_refusals_are_not(server, tmp_path):
    server.status = [503, 429]
    get(server, tmp_path / "f")
    server.status, server.seen[:] = 404, []
    with pytest.raises(DataNotFoundError, match="404"):
        get(server, tmp_path / "g")
    assert len(server.seen) == 1


def test_it_gives_up_after_its_tries_and_says_what_is_kept(server, tmp_path):
    server.status = 503
    with pytest.raises(DataNotFoundError, match="could not be fetched.*0 bytes are kept"):
        get(server, tmp_path / "f", tries=3)
    assert len(server.seen) == 3


# ---- ALFWorld


def game(wording="move", **change):
    template = {"move": "move {o} to {r}", "put": "put {o} in/on {r}"}[wording]
    data = {
        "pddl_domain": "d",
        "grammar": f'template :: "{template}";',
        "pddl_problem": "p",
        "solvable": True,
        "walkthrough": ["look"],
    }
    return json.dumps({**data, **change}).encode()


def archive(files):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in files.items():
            zipped.writestr(name, content)
    return held.getvalue()


GAMES = {
    "json_2.1.1/valid_seen/pick_and_place_simple-Mug-None-Desk-1/trial_1/game.tw-pddl": game(),
    "json_2.1.1/valid_seen/look_at_obj_in_light-CD-None-DeskLamp-2/trial_2/game.tw-pddl": game(
        pddl_problem="q"
    ),
    "json_2.1.1/train/pick_two_obj_and_place-Pen-None-Desk-3/trial_3/game.tw-pddl": game("put"),
}


def urls(server):
    return {"TW_PDDL_FILES_URL": server.url}


def test_games_are_downloaded_unpacked_recorded_and_checked(server, tmp_path):
    server.content = archive(GAMES)
    report = download_alfworld(tmp_path, False, urls=urls(server))
    assert report.ok and not report.complete
    assert {name: split.total for name, split in report.splits.items()} == {"train": 1, "valid_seen": 2}
    entry = json.loads((tmp_path / RECORD_NAME).read_text())["games.zip"]
    assert entry == {
        "url": server.url,
        "bytes": len(server.content),
        "sha256": hashlib.sha256(server.content).hexdigest(),
        "by_hand": False,
    }
    assert not (tmp_path / "games.zip").exists()
    for name, content in GAMES.items():
        assert (tmp_path / name).read_bytes() == content


def test_a_second_call_fetches_nothing_unless_something_is_missing(server, tmp_path):
    server.content = archive(GAMES)
    download_alfworld(tmp_path, False, urls=urls(server))
    download_alfworld(tmp_path, False, urls=urls(server))
    assert len(server.seen) == 1
    lost = tmp_path / next(iter(GAMES))
    lost.unlink()
    download_alfworld(tmp_path, False, urls=urls(server))
    assert len(server.seen) == 2 and lost.exists()


def test_an_archive_brought_by_hand_is_used_without_network(tmp_path):
    (tmp_path / "games.zip").write_bytes(archive(GAMES))
    report = download_alfworld(tmp_path, False, urls={"TW_PDDL_FILES_URL": "http://127.0.0.1:9/games.zip"})
    assert report.ok
    assert (tmp_path / "games.zip").exists()


def test_without_network_the_message_says_what_to_fetch_and_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setattr("divopd_gym.transfer.time.sleep", lambda s: None)
    url = "http://127.0.0.1:9/games.zip"
    with pytest.raises(DataNotFoundError) as caught:
        download_alfworld(tmp_path, False, urls={"TW_PDDL_FILES_URL": url})
    assert f"fetch {url} elsewhere" in str(caught.value)
    assert str(tmp_path / "games.zip") in str(caught.value)
    assert "split='generated'" in str(caught.value)


def test_an_archive_that_is_none_is_refused(tmp_path):
    (tmp_path / "games.zip").write_bytes(b"<html>sign in</html>")
    with pytest.raises(DataNotFoundError, match="damaged.*Delete it"):
        download_alfworld(tmp_path, False, urls={"TW_PDDL_FILES_URL": "http://127.0.0.1:9/games.zip"})


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "..\\outside"])
def test_an_archive_never_writes_outside_the_data_directory(tmp_path, name):
    data = tmp_path / "data"
    data.mkdir()
    (data / "games.zip").write_bytes(archive({name: b"x"}))
    with pytest.raises(DataNotFoundError, match="outside the data directory"):
        download_alfworld(data, False, urls={"TW_PDDL_FILES_URL": "http://127.0.0.1:9/games.zip"})
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_a_data_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can be written to"):
        download_alfworld(tmp_path / "file", False)


def test_a_progress_bar_goes_to_standard_error(server, tmp_path, capsys):
    server.content = archive(GAMES)
    download_alfworld(tmp_path, True, urls=urls(server))
    out, err = capsys.readouterr()
    assert out == ""
    assert "games.zip" in err


def test_official_addresses_are_known_with_and_without_the_package(monkeypatch):
    installed = alfworld_urls()
    monkeypatch.setattr("importlib.metadata.files", lambda name: None)
    assert set(alfworld_urls()) == set(installed)
    assert all(url.startswith("https://") and url.endswith(".zip") for url in installed.values())


def test_official_counts_add_up():
    assert [sum(OFFICIAL_COUNTS[split].values()) for split in SPLITS] == [3553, 200, 140, 134]


def lay(root, games):
    for name, content in games.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_check_counts_games_by_split_and_type_and_tells_the_wording(tmp_path):
    lay(tmp_path, GAMES)
    report = check_alfworld(tmp_path)
    assert report.splits["valid_seen"].games == {
        **dict.fromkeys(TASK_TYPES, 0),
        "pick_and_place_simple": 1,
        "look_at_obj_in_light": 1,
    }
    assert report.wording == {"move": 2, "put": 1}
    assert "1/35" in report.text() and "absent" in report.text()
    assert check_alfworld(tmp_path / "json_2.1.1").digest == report.digest
    json.dumps(report.to_dict())


def test_trials_that_are_officially_no_games_are_skipped_not_broken(tmp_path):
    lay(
        tmp_path / "json_2.1.1" / "train",
        {
            "pick_and_place_simple-Mug-None-Desk-1/trial_1/traj_data.json": b"{}",
            "pick_and_place_with_movable_recep-Mug-Bowl-Desk-1/trial_1/game.tw-pddl": game(),
            "pick_and_place_simple-AppleSliced-None-Desk-1/trial_1/game.tw-pddl": game(),
            "pick_and_place_simple-Mug-None-Desk-2/trial_1/game.tw-pddl": game(solvable=False),
            "pick_and_place_simple-Mug-None-Desk-3/trial_1/game.tw-pddl": game(),
        },
    )
    split = check_alfworld(tmp_path).splits["train"]
    assert (split.total, split.skipped, split.broken) == (1, 4, [])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (game()[:-20], "written half"),
        (b"", "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[]", "no JSON object"),
        (b'{"grammar": "", "pddl_domain": "", "solvable": true}', "lacks pddl_problem"),
        (b'{"grammar": "", "pddl_domain": "", "pddl_problem": ""}', "lacks solvable"),
        (game(grammar=3), "no text"),
    ],
)
def test_broken_games_are_named_with_what_is_wrong(tmp_path, content, why):
    lay(tmp_path, GAMES)
    path = tmp_path / "json_2.1.1/train/pick_and_place_simple-Mug-None-Desk-9/trial_1/game.tw-pddl"
    lay(tmp_path, {path.relative_to(tmp_path).as_posix(): content})
    report = check_alfworld(tmp_path)
    assert not report.ok
    [(named, said)] = report.splits["train"].broken
    assert named == str(path) and why in said
    assert str(path) in report.text() and "Delete the broken files" in report.text()


def test_digest_changes_with_any_game_and_not_with_anything_else(tmp_path):
    lay(tmp_path, GAMES)
    before = check_alfworld(tmp_path)
    first = tmp_path / next(iter(GAMES))
    (first.parent / "traj_data.json").write_text("{}")
    assert check_alfworld(tmp_path).digest == before.digest
    first.write_bytes(game(pddl_problem="other"))
    after = check_alfworld(tmp_path)
    assert after.digest != before.digest
    assert after.splits["train"].digest == before.splits["train"].digest


def test_a_directory_without_games_is_refused_with_the_expected_layout(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataNotFoundError, match=r"json_2.1.1/<split>.*divopd data download alfworld"):
            check_alfworld(path)


@pytest.mark.env
def test_the_real_games_are_whole_where_they_should_be(shared_data, tmp_path):
    with tarfile.open(shared_data("alfworld.tar.xz")) as packed:
        packed.extractall(tmp_path, filter="data")
    report = check_alfworld(tmp_path)
    assert report.ok
    for split in ("valid_train", "valid_seen", "valid_unseen"):
        assert report.splits[split].games == OFFICIAL_COUNTS[split]
    assert report.wording == {"move": 528}
    shutil.rmtree(tmp_path / "json_2.1.1")
