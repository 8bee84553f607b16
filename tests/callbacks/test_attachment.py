import threading
import time
from queue import SimpleQueue

from responding import ManagerStub

from gptmanager.callbacks.queue.attachment import Attachment
from gptmanager.errors import ManagerDeadError

TIMEOUT = 30.0


def test_the_end_of_the_manager_is_reported_once_with_its_cause():
    # Given an attachment to a living manager
    manager, ends = ManagerStub(), SimpleQueue()

    def told(error):
        ends.put(error)
        time.sleep(0.05)  # the thread lives a little longer than whoever waits for the end

    attachment = Attachment(manager, told)
    attachment.notify()
    assert manager.notified.acquire(timeout=TIMEOUT)

    # When it is joined, it does not wait for the manager
    attachment.join()
    assert ends.empty()

    # When the manager dies
    cause = RuntimeError("boom")
    manager.end(cause)

    # Then the end is told, and no thread is left
    error = ends.get(timeout=TIMEOUT)
    assert isinstance(error, ManagerDeadError)
    assert error.__cause__ is cause
    attachment.join()
    assert "request-queue" not in {thread.name for thread in threading.enumerate()}
    assert ends.empty()


def test_the_watcher_may_join_itself():
    manager, joined = ManagerStub(), threading.Event()

    def join(error):
        attachment.join()
        joined.set()

    attachment = Attachment(manager, join)
    manager.end()

    assert joined.wait(TIMEOUT)


def test_a_dead_manager_is_not_news():
    class Dead(ManagerStub):
        def notify(self):
            raise ManagerDeadError("dead")

        def wait(self, timeout=None):
            raise ManagerDeadError("dead")

    ends = SimpleQueue()
    attachment = Attachment(Dead(), ends.put)

    attachment.notify()

    assert isinstance(ends.get(timeout=TIMEOUT), ManagerDeadError)
