"""The page as a browser sees it."""

import pytest
from report_browser import Browser, find_chromium
from report_fakes import metric_run, write_tokenizer
from run_fakes import fake_run

from divopd_trainer.report import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium here to open the page with"),
]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    path = fake_run(tmp_path_factory.mktemp("single") / "run", updates=12)
    write_tokenizer(path / "final", [f"\u0120w{i}" for i in range(600)])
    return write_report([path], png=False).html


@pytest.fixture(params=[False, True], ids=["light", "dark"])
def browser(request, tmp_path):
    with Browser(tmp_path / "profile", dark=request.param) as browser:
        yield browser


def test_the_page_opens_offline_without_errors_and_fits_a_laptop(single, browser):
    browser.open(single)
    assert browser.errors == []
    assert browser.requests == [single.resolve().as_uri()]
    assert browser.js("document.documentElement.scrollWidth") <= 1280
    assert browser.js("document.querySelectorAll('figure.chart svg').length") >= 15


def test_an_opened_turn_shows_its_tokens_with_their_gaps(single, browser):
    browser.open(single)
    browser.js("document.querySelectorAll('.item')[2].click()")
    browser.until("document.querySelector('.item[aria-selected=true]')?.dataset.id === '2'")
    browser.until("document.querySelector('.detail h3').textContent.startsWith('#2 ')")
    assert browser.js("document.querySelector('.tokens')") is None
    browser.js("document.querySelector('.more').click()")
    assert browser.js("document.querySelectorAll('.token').length") == 6
    assert browser.js("/^ w\\d+$/.test(document.querySelector('.token').textContent)")
    assert browser.js(
        "/id \\d+: [+-]?\\d+\\.\\d\\d nats|no loss/.test(document.querySelector('.token').dataset.tip)"
    )
    assert "trained at update" in browser.js("document.querySelector('.detail').textContent")
    browser.js("document.querySelector('.more').click()")
    assert browser.js("document.querySelectorAll('.token').length") == 0


def test_the_list_is_filtered_and_walked_with_the_keyboard(single, browser):
    browser.open(single)
    every = browser.js("document.querySelector('.count').textContent")
    browser.js(
        "(s => { s.value = 'yes'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('select[aria-label=outcome]'))"
    )
    browser.until(f"document.querySelector('.count').textContent !== '{every}'")
    assert browser.js(
        "[...document.querySelectorAll('.item .outcome')].every(e => e.textContent === 'solved')"
    )
    first = browser.js("document.querySelector('.item[aria-selected=true]').dataset.id")
    browser.js(
        "document.querySelector('.rows').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown'}))"
    )
    browser.until(f"document.querySelector('.item[aria-selected=true]').dataset.id !== '{first}'")


def test_a_method_is_switched_off_in_all_charts(tmp_path, browser):
    paths = [
        metric_run(tmp_path / f"{m}{s}", m, s, updates=12) for m in ("vanilla", "divopd") for s in range(3)
    ]
    browser.open(write_report(paths, tmp_path / "out", png=False).html)
    visible = (
        "[...document.querySelectorAll('.g1')].filter(e => getComputedStyle(e).display !== 'none').length"
    )
    assert browser.js(visible) > 10
    browser.js("document.querySelectorAll('.chip')[1].click()")
    assert browser.js(visible) == 0
    assert browser.errors == []


def test_no_script_but_the_pages_own_is_run(single, browser, tmp_path):
    text = single.read_text().replace("</main>", "<script>window.hacked = 1</script></main>")
    (tmp_path / "hacked.html").write_text(text)
    browser.open(tmp_path / "hacked.html")
    assert browser.js("window.hacked") is None
    assert any("Content Security Policy" in error for error in browser.errors)
