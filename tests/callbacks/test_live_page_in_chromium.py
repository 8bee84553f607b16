"""The live page in a browser: drawing, reconnecting, readability, and markup from a host."""

from __future__ import annotations

import itertools
import re
import time
from urllib.parse import urlsplit

import pytest
from chromium import EXECUTABLE, Chromium

from gptmanager import GptManager, InferenceRequest, ModelType, OptionalParams
from gptmanager.callbacks import LivePage
from gptmanager.callbacks.live_page import feed, page_server
from gptmanager.testing import RecordingCallbacks, ScriptedModel

pytestmark = [
    pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium"),
    pytest.mark.xdist_group("chromium"),
]
FAILS = "<img src=x onerror=document.title='hacked'><script>alert(1)</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module", autouse=True)
def fast():
    """Let pages have their events sooner."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((page_server, "TICK_S"), (feed, "TICK_S"), (feed, "_WHY_S")):
            patch.setattr(module, name, 0.1)
        yield


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Replaces the folder's check: the browser, which all tests share, keeps its connections."""


@pytest.fixture(autouse=True)
def as_new(request):
    if "browser" in request.fixturenames:
        browser = request.getfixturevalue("browser")
        browser.resize(1280, 900)
        browser.prefer("light")
        browser.errors.clear()


class Endless(RecordingCallbacks):
    """`count` requests are always active; some wait."""

    def __init__(self, count):
        super().__init__()
        self._ids, self._count = itertools.count(1), count

    def get_inference_requests(self, max_num_requests):
        number = min(max_num_requests, self._count)
        return [
            InferenceRequest.from_tokens(i, [1] * (4 + i % 9), 20 + i % 50)
            for i in itertools.islice(self._ids, number)
        ]


def managed(host, batch, active, step_s=0.01):
    model = ScriptedModel(lambda history: 1, vocab_size=4)
    forward = model.forward

    def slow_forward(*arguments):
        time.sleep(step_s)
        return forward(*arguments)

    model.forward = slow_forward
    params = OptionalParams(
        max_batch_size=batch, max_active_requests=active, max_get_failures=1, max_num_tokens=4096
    )
    return GptManager(
        model, ModelType.INFLIGHT_FUSED_BATCHING, **host.keywords(), optional_params=params
    )


@pytest.fixture(scope="module")
def url():
    """Yield the URL of a page that shows 256 running requests and 8 waiting ones."""
    with managed(Endless(264), 256, 264, 0.02) as manager:
        with LivePage() as page:
            page.attach(manager)
            yield page.serve()
        manager.shutdown(drain=False)


RUNS = "document.querySelector('#state').textContent === 'Running' && view.shown.length > 100"


def test_it_draws_and_moves(browser, url):
    browser.open(url)
    browser.wait_for(RUNS)
    browser.wait_for("points.at(-1)[2] === 256 && points.at(-1)[4] === 8")
    browser.wait_for("view.shown.filter(row => !row.end).length === 264")
    browser.wait_for("Number(document.querySelector('#steps').textContent) > 0")
    column = browser.wait_for("view.head > 10 && view.head")
    before = browser.evaluate(_HASH)
    browser.wait_for(f"view.head > {column} + 2")
    assert browser.evaluate(_HASH) != before
    # the expected marks are visible, in their colors
    for name in ("context", "generation", "faint", "ink"):
        browser.wait_for(_HAS_COLOR.replace("NAME", name))
    assert "for room in the batch" in browser.wait_for(
        "document.querySelector('#why').textContent.includes('wait') "
        "&& document.querySelector('#why').textContent"
    )
    assert browser.evaluate("document.querySelectorAll('#calls tr').length") >= 4
    assert browser.errors == []


_HASH = "document.querySelector('#rows').toDataURL()"
_HAS_COLOR = """(() => {
  const canvas = document.querySelector("#rows");
  const color = colors["NAME"].match(/\\w\\w/g).map(two => parseInt(two, 16));
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 250 && color.every((c, k) => Math.abs(data[i + k] - c) < 3)) return true;
  return false;
})()"""


def test_it_fits_and_reads_well(browser, url):
    browser.open(url)
    browser.wait_for(RUNS)
    for width in (1280, 390):
        browser.resize(width, 800, mobile=width < 600)
        browser.wait_for(f"innerWidth === {width}")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        right = "document.querySelector('NAME').getBoundingClientRect().right"
        for name in ("#rows", "#panels", "#pause"):
            assert browser.evaluate(right.replace("NAME", name)) <= width
        assert browser.evaluate("document.querySelector('#rows').clientWidth") > 0.9 * (width - 40)
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        colors = browser.evaluate("readColors(), colors")
        assert (brightness(colors["paper"]) > 0.5) == (scheme == "light")
        for text, back in (
            ("ink", "paper"), ("faint", "paper"), ("limit", "paper"), ("ink", "hover"),
            ("on-context", "context"),
        ):  # fmt: skip
            assert contrast(colors[text], colors[back]) >= 4.5, (scheme, text, back)
        for mark in ("generation", "context-edge", "paused", "memory", "limit"):
            assert contrast(colors[mark], colors["paper"]) >= 3, (scheme, mark)


def brightness(color):
    """Relative luminance, WCAG 2.2."""
    values = [int(two, 16) / 255 for two in re.findall(r"\w\w", color)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return sum(share * v for share, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


def test_keys_pointer_and_filter(browser, url):
    browser.open(url)
    browser.wait_for(RUNS)
    browser.evaluate("document.querySelector('#plot').focus()")
    browser.press("ArrowDown")
    browser.press("ArrowDown")
    tip, chosen = browser.evaluate("[document.querySelector('#tip').textContent, selected.id]")
    assert tip.startswith(f"request {chosen}: ") and "tokens generated, prompt" in tip
    browser.press("Escape")
    assert browser.evaluate("document.querySelector('#tip').hidden")

    browser.wait_for("view.head > 10")  # so that there is something to the left
    browser.press(" ", " ")
    assert browser.evaluate("document.querySelector('#pause').getAttribute('aria-pressed')") == (
        "true"
    )
    head, points = browser.evaluate("[view.head, points.length]")
    browser.wait_for(f"points.length > {points} + 2")
    assert browser.evaluate("view.head") == head
    column = browser.evaluate("view.column")
    browser.press("ArrowLeft")
    browser.press("+", "+")
    browser.wait_for(f"view.head < {head} && view.column > {column}")
    browser.press("End")
    browser.wait_for(f"view.head > {head} && !view.paused")

    x, y = browser.evaluate(
        "(box => [box.left + 300, box.top + 60])("
        "document.querySelector('#plot').getBoundingClientRect())"
    )
    browser.point_at(x, y)
    browser.point_at(x + 1, y)
    browser.wait_for("!document.querySelector('#tip').hidden && pointer !== null")
    browser.point_at(2, 2)
    browser.wait_for("document.querySelector('#tip').hidden")

    browser.evaluate("document.querySelector('#filter').value = 'waiting'; refresh()")
    browser.wait_for("view.shown.length === 8 && view.shown.every(r => kindOf(r) === 'waiting')")
    browser.evaluate("document.querySelector('#list').open = true")
    browser.wait_for("document.querySelectorAll('#table tr').length === 8")
    browser.evaluate("document.querySelector('#filter').value = 'none'; refresh()")
    browser.wait_for("document.querySelector('#empty').textContent.includes('No request matches')")


@pytest.mark.slow
def test_it_comes_back(browser):
    host = RecordingCallbacks()
    with managed(host, 4, 4, 0.002) as manager:
        with LivePage() as page:
            page.attach(manager)
            url = page.serve()
            browser.open(url)
            browser.wait_for("document.querySelector('#state').textContent === 'Idle'")
            browser.wait_for(
                "document.querySelector('#empty').textContent.includes('Nothing runs')"
            )
            host.submit(InferenceRequest.from_tokens(7, [1] * 4, 20))
            browser.wait_for("view.shown.length === 1 && view.shown[0].end")
        browser.wait_for("document.querySelector('#state').textContent === 'Connection lost'")
        host.submit(InferenceRequest.from_tokens(8, [1] * 4, 1500))
        with LivePage() as page:
            page.attach(manager)
            page.serve(port=urlsplit(url).port)
            browser.wait_for("document.querySelector('#state').textContent === 'Running'")
            assert browser.evaluate("[...rows.values()].map(row => row.id)") == ["8"]
            browser.wait_for("view.shown.length > 0")
            tokens = browser.evaluate("view.shown[0].tokens")
            browser.wait_for(f"view.shown[0].tokens > {tokens}")
            manager.shutdown(drain=False)
            browser.wait_for("document.querySelector('#state').textContent === 'Stopped'")


class Hostile(RecordingCallbacks):
    """A host with a Get that always raises an error, with markup in its text."""

    def get_inference_requests(self, max_num_requests):
        raise RuntimeError(FAILS)


def test_markup_stays_text(browser):
    with LivePage() as page, managed(Hostile(), 4, 4) as manager:
        page.attach(manager)
        browser.open(page.serve())
        browser.wait_for("document.querySelector('#state').textContent === 'Failed'")
        text = browser.evaluate("document.querySelector('#banner').textContent")
        assert FAILS in text and text.startswith("The manager has failed.")
        # ids and outcomes are numbers and names; but the page does not rely on it
        browser.evaluate(
            f"values.why = [['x', {FAILS!r}, '0']]; "
            f"addRow([0, {FAILS!r}, 4, 5, 1, .5, 1, 0, 0, [['w', 0, 0]], null]); "
            f"addRow([1, '1', 4, 5, 1, .5, 1, 0, 0, [['w', 0, 0]], [0, {FAILS!r}, 1, 0]]); "
            "points.push([1, 1, 0, 0, 0, 0, 0, 0, 0, 0]); view.head = 1; drawRows(); "
            "document.querySelector('#list').open = true; showWaits(); showTable(); choose(0); "
        )
        for place in ("#tip", "#why", "#table"):
            seen = browser.evaluate(f"document.querySelector('{place}').textContent")
            assert "onerror" in seen, place
        assert browser.evaluate("document.querySelectorAll('img, #why script').length") == 0
        assert browser.evaluate("document.title") != "hacked"
        assert browser.errors == []


# Decisions of the script. One expression makes the events, so the page's own cannot interfere ---

_SHOWN = """(() => {{
  const row = (n, end) => [n, String(n), 4, 9, 0, .5, 1, 0, n, [["g", n, 0]], end];
  const ended = [...Array(300).keys()].map(n => row(n, [n + 2, "LENGTH", 2, 0, 0, 0, 0]));
  begin({{rows: [...ended, ...[...Array({active}).keys()].map(n => row(300 + n, null))],
    points: [[400, 0, 0, 0, 0, 0, 0, 0, 0, 0]], limits: [8, 64, 100, 16]}});
  pause({paused});
  chooseRows(1000);
  const shown = view.shown.filter(row => row.end).length;
  pause(false);
  return shown;
}})()"""


def test_the_number_of_ended_rows_does_not_depend_on_running_ones(browser, url):
    browser.open(url)
    browser.wait_for(RUNS)
    cases = [(0, "false"), (1, "false"), (250, "false"), (1, "true")]
    shown = [
        browser.evaluate(_SHOWN.format(active=active, paused=paused)) for active, paused in cases
    ]
    assert shown == [48] * 4


def test_an_unknown_reason_has_dashes_of_its_own(browser, url):
    browser.open(url)
    dashes = browser.evaluate("['', 'adapter_pages', 'x'].map(it => DASHES[it] ?? OTHER)")
    known = browser.evaluate("Object.values(DASHES)")
    assert dashes[0] == dashes[1] == dashes[2] and dashes[0] not in known
    assert "not known" in browser.evaluate("document.querySelector('#legend').textContent")


_FAST = """(() => {
  // first 1,000 iterations a second, then 4,000
  const column = k => k <= 30 ? k * 200 : 6000 + (k - 30) * 800;
  const points = [...Array(61).keys()].map(k => [column(k), k * 200, 1, 1, 0, 0, 1, 0, 0, 0]);
  begin({rows: [], points, limits: [8, 64, 100, 16]});
  [view.zoom, view.column] = [-1, 6];
  chooseZoom(1000);
  return [view.column, ticks(150, 1150).map(([at, name]) => [Math.round(at), name])];
})()"""


def test_at_thousands_of_iterations_a_second_the_axis_shows_time(browser, url):
    browser.open(url)
    browser.wait_for(RUNS)
    column, ticks = browser.evaluate(_FAST)
    assert 1000 / column > 4000 * 9  # about ten seconds are seen
    assert ticks[0] == [30000, "now"] and len(ticks) > 4
    by_age = {int(name.split()[0]): at for at, name in ticks[1:]}
    for age, at in by_age.items():
        assert at == (30000 - 4000 * age if age <= 6 else 1000 * (12 - age))


def test_the_text_for_no_rows_is_hidden_if_there_are_rows(browser, url):
    browser.open(url)
    browser.wait_for("view.shown.length > 0")
    assert browser.evaluate("document.querySelector('#empty').hidden")


def test_a_silent_server_is_reported(browser, url):
    browser.open(url)
    browser.wait_for(RUNS)
    said = browser.evaluate("heard = performance.now() - 2600, stateWords()")
    assert said == ["The server has been silent for 2 s", "bad"]
