"""A person in the browser: one episode over HTTP, by plain requests and in headless Chromium."""

import http.client
import json
import os
import queue
import re
import shutil
import subprocess
import threading
import time
import urllib.parse

import pytest

from divopd_gym.envs.webshop.serve import serve
from divopd_gym.errors import ConfigError

KWARGS = {"num_products": 20}


@pytest.fixture
def shop():
    """Start a server; gives its address, the thread and where its result will be."""
    urls: queue.Queue[str] = queue.Queue()
    result = {}

    def run():
        result["info"] = serve(KWARGS, task="0", ready=urls.put, idle_s=60)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    url = urls.get(timeout=60)
    yield url, thread, result
    if thread.is_alive():
        result["left"] = True


def ask(url, method="GET", path="/", form=None, **headers):
    where = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=20)
    body = None if form is None else urllib.parse.urlencode(form)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def buy_something(url):
    ask(url, "POST", "/act", {"query": "window curtain"})
    _, page = ask(url)
    link = re.search(r'name="action" value="(click\[g[0-9a-z]{9}\])"', page)
    ask(url, "POST", "/act", {"action": link[1]})
    ask(url, "POST", "/act", {"action": "click[buy now]"})
    return ask(url)[1]


def test_one_episode_is_served_and_then_the_server_ends(shop):
    url, thread, result = shop
    status, page = ask(url)
    assert status == 200 and 'id="search_input"' in page
    last = buy_something(url)
    assert "Score:" in last
    thread.join(20)
    assert not thread.is_alive()
    assert result["info"]["done_reason"] in ("success", "failure")


def test_requests_of_other_origins_are_refused(shop):
    url, _, _ = shop
    assert ask(url, "POST", "/act", {"action": "x"}, Origin="http://evil.example")[0] == 403
    assert ask(url, Host="evil.example")[0] == 403


def test_malformed_requests_are_answered_and_do_not_end_the_episode(shop):
    url, thread, _ = shop
    assert ask(url, path="/elsewhere")[0] == 404
    assert ask(url, "POST", "/nowhere", {"action": "x"})[0] == 400
    assert ask(url, "POST", "/act", {"action": "\x00[" * 5000})[0] == 303
    assert ask(url, "POST", "/act", {"action": "<script>alert(1)</script>"})[0] == 303
    status, page = ask(url)
    assert status == 200 and "<script" not in page and "did nothing" in page
    assert thread.is_alive()


def test_a_port_in_use_is_one_clear_error(shop):
    port = urllib.parse.urlsplit(shop[0]).port
    with pytest.raises(ConfigError, match="another port"):
        serve(KWARGS, port=port, ready=lambda url: None)


class Browser:
    """Chromium without a window, spoken to over its debugging pipe."""

    def __init__(self, program, profile):
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()

        def place():
            os.dup2(to_read, 103)
            os.dup2(to_write, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)

        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        self.process = subprocess.Popen(
            [program, *options, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._buffer = b""
        self._answers: queue.Queue[dict] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = None
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

    _session = None

    def _listen(self):
        while chunk := os.read(self._from, 65536):
            *messages, self._buffer = (self._buffer + chunk).split(b"\0")
            for message in messages:
                self._answers.put(json.loads(message))

    def call(self, method, timeout=60, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while True:
            answer = self._answers.get(timeout=max(0.1, end - time.monotonic()))
            if answer.get("id") == self._number:
                return answer["result"]

    def value(self, expression):
        return self.call("Runtime.evaluate", expression=expression)["result"].get("value")

    def wait_for(self, expression, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self.value(expression):
                    return True
            except KeyError:
                pass
            time.sleep(0.1)
        return False

    def close(self):
        self.process.kill()
        self.process.wait(20)
        os.close(self._to)


@pytest.mark.env
def test_a_person_can_shop_in_a_browser(shop, tmp_path):
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed")
    url, thread, result = shop
    browser = Browser(program, tmp_path / "profile")
    try:
        browser.call("Page.navigate", url=url)
        assert browser.wait_for("!!document.querySelector('#search_input')")
        browser.value(
            "document.querySelector('#search_input').value='window curtain';"
            "document.querySelector('main#index form button').click()"
        )
        assert browser.wait_for("!!document.querySelector('main#results button.link')")
        browser.value("document.querySelector('button.link').click()")
        assert browser.wait_for("!!document.querySelector('main#item')")
        if browser.value("!!document.querySelector('button.option')"):
            browser.value("document.querySelector('button.option').click()")
            assert browser.wait_for("!!document.querySelector('button.chosen')")
        browser.value("[...document.querySelectorAll('button')].find(b => b.innerText == 'Buy Now').click()")
        assert browser.wait_for("document.querySelector('#state')?.innerText.includes('Score')")
    finally:
        browser.close()
    thread.join(20)
    assert not thread.is_alive() and result["info"]["turns"] >= 3
