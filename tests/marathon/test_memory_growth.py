"""A leak is told from a process that warms up."""

import math

import pytest
from memory_growth import lasting_growth


def sizes(function, length=300):
    return {float(at): function(at / 60) for at in range(length)}


@pytest.mark.parametrize("rate", [0.0, 1.5])
def test_a_leak_is_found_at_its_rate(rate):
    assert lasting_growth(sizes(lambda minutes: 400 + rate * minutes), 300) == rate


def test_the_first_memory_of_a_process_is_not_a_leak():
    warming = sizes(lambda minutes: 427 - 12 * math.exp(-minutes / 1.2))
    assert lasting_growth(warming, 300) < 0.5
    leaking = {at: size + 1.5 * at / 60 for at, size in warming.items()}
    assert lasting_growth(leaking, 300) > 1.5


def test_one_step_up_is_not_a_leak():
    assert lasting_growth(sizes(lambda minutes: 400 + 30 * (minutes > 4)), 300) == 0


def test_a_quarter_without_sizes_proves_nothing():
    assert lasting_growth({0.0: 1.0, 299.0: 2.0}, 300) is None
