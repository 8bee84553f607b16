import asyncio
import logging

import pytest

from gptmanager.callbacks import fan_out
from gptmanager.errors import ConfigError


def test_all_are_called_in_order_and_the_first_one_answers():
    calls = []

    def callback(name):
        return lambda *args: (calls.append((name, *args)), name)[1]

    call_all = fan_out(callback("a"), callback("b"), callback("c"))

    assert call_all(1, "x") == "a"
    assert calls == [("a", 1, "x"), ("b", 1, "x"), ("c", 1, "x")]


def test_only_the_first_one_may_be_a_generator():
    def requests(room):
        yield room

    assert list(fan_out(requests, print)(3)) == [3]
    with pytest.raises(ConfigError, match=r"callback 1 of fan_out\(\)"):
        fan_out(print, requests)


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError, SystemExit])
def test_an_observer_that_raises_stops_no_other_and_is_logged(caplog, error):
    seen = []

    def failing(record):
        raise error("boom")

    call_all = fan_out(seen.append, failing, seen.append)
    with caplog.at_level(logging.WARNING):
        call_all("one")
        call_all("two")

    assert seen == ["one", "one", "two", "two"]
    assert ["boom" in record.getMessage() for record in caplog.records] == [True, True]
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]


def test_what_the_first_one_raises_reaches_the_manager_after_the_others_ran():
    seen = []

    def failing(record):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fan_out(failing, seen.append)("one")

    assert seen == ["one"]
