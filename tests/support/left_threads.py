"""`no_thread_is_left`: whatever a test has started has ended with it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_thread_is_left(prefix: str = "") -> Iterator[None]:
    """Threads that the block starts end with it, if their names begin with `prefix`."""
    before = set(threading.enumerate())
    yield
    left = [it for it in {*threading.enumerate()} - before if it.name.startswith(prefix)]
    for thread in left:
        thread.join(30.0)
    assert not [thread for thread in left if thread.is_alive()]
