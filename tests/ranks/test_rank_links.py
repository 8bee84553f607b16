"""Links between ranks: every wait ends, with what was waited for or with who is to blame."""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from own_time import own_time
from rank_links import at_once, linked, outcome
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from gptmanager.environment.machine.loopback import is_loopback
from gptmanager.errors import RankError
from gptmanager.lifecycle import clock
from gptmanager.ranks import links as own_links
from gptmanager.ranks import watch as own_watch
from gptmanager.ranks.frames import Frames, Wakener
from gptmanager.ranks.links import Links, Message
from gptmanager.ranks.meeting import Channel, _Reception, call, meet
from gptmanager.ranks.watch import Watch

# Frames ----------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    """A connection as frames, and its other end as a bare socket."""
    ours, other = socket.socketpair()
    bell = Wakener()
    frames = Frames(ours, bell, lambda: None, 0.02)
    frames.bell = bell
    yield frames, other
    frames.close()
    other.close()
    bell.close()


def message(payload, kind=7):
    return struct.pack("<QB", len(payload), kind) + payload


@pytest.mark.parametrize("size", [0, 1, 4096, (1 << 16) + 1, 5 << 20])
def test_a_message_comes_as_it_was_sent(pair, size):
    frames, other = pair
    there = Frames(other, None, lambda: None, 0.02)
    payload = os.urandom(size)
    both = [lambda: frames.send(3, payload), there.receive]
    assert at_once(lambda body: body(), both)[1] == (3, payload)


def test_messages_that_arrive_together_or_byte_by_byte_are_separated(pair):
    frames, other = pair
    other.sendall(message(b"one") + message(b"", 1) + message(b"three")[:-1])
    assert [frames.receive() for _ in range(2)] == [(7, b"one"), (1, b"")]
    assert frames.poll() is None
    other.sendall(b"e")
    assert frames.poll() == (7, b"three")
    for byte in message(b"slow"):
        assert frames.poll() is None
        other.sendall(bytes([byte]))
    assert frames.receive() == (7, b"slow")


@pytest.mark.parametrize("cut", [0, 4, 9, 12])
def test_a_message_that_is_cut_off_is_the_end(pair, cut):
    frames, other = pair
    other.sendall(message(b"abcdef")[:cut])
    other.close()
    with pytest.raises(EOFError):
        frames.receive()


def test_a_length_that_cannot_be_is_the_end_and_takes_no_memory(pair):
    frames, other = pair
    other.sendall(struct.pack("<QB", 1 << 63, 0))
    for read in (frames.receive, frames.poll):
        with pytest.raises(EOFError, match="is over the limit"):
            read()


class Counted:
    """A socket, and how much was asked of it at once."""

    def __init__(self, real):
        self.real, self.asked = real, []

    def __getattr__(self, name):
        return getattr(self.real, name)

    def recv(self, size):
        self.asked.append(size)
        return self.real.recv(size)


def test_what_has_not_come_takes_no_memory():
    ours, other = socket.socketpair()
    ours = Counted(ours)
    with ours.real, other:
        frames = Frames(ours, None, lambda: None, 0.02)
        other.sendall(struct.pack("<QB", 1 << 33, 0) + b"x")
        assert frames.poll() is None
        other.close()
        with pytest.raises(EOFError):
            frames.receive()
    assert max(ours.asked) <= 1 << 20


def test_a_peer_that_does_not_read_blocks_a_sender_until_the_sender_is_ended(pair):
    frames, _other = pair
    calls = []

    def between():
        calls.append(1)
        if len(calls) == 3:
            raise RankError("enough")

    frames._between = between
    with pytest.raises(RankError, match="enough"):
        frames.send(0, bytes(50 << 20))


@pytest.mark.parametrize("size", [1, 50 << 20])
def test_sending_to_a_closed_peer_is_the_end(pair, size):
    frames, other = pair
    other.close()
    with pytest.raises(EOFError):
        for _ in range(2):
            frames.send(0, bytes(size))


def test_a_ring_ends_a_wait_that_may_be_woken_and_not_the_others(pair):
    frames, other = pair
    frames.bell.ring()
    assert frames.receive(returns_when_rung=True) is None
    assert select.select([frames.bell], [], [], 0) == ([], [], [])  # it is heard once
    frames.bell.ring()
    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(frames.receive)
        time.sleep(0.05)
        other.sendall(message(b"late"))
        assert work.result(30) == (7, b"late")
    assert frames.poll() is None


def test_a_bell_without_a_listener_or_closed_is_harmless():
    bell = Wakener()
    for _ in range(100_000):
        bell.ring()
    bell.clear()
    bell.close()
    bell.ring()
    bell.clear()


# Links -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_know_what_each_gives(size):
    given = [b"%d" % rank * rank for rank in range(size)]
    with linked(size) as links:
        answers = at_once(lambda it: it.exchange(given[it.rank]), links)
        assert answers == [given] * size
        at_once(lambda it: it.send(Message.INTAKE, b"x") if it.rank == 0 else it.receive(), links)
        assert [it.failure for it in links] == [None] * size


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.1", "", socket.gethostname()])
def test_rank_0_is_found_under_any_name_of_its_machine(host):
    try:
        socket.getaddrinfo(host or "localhost", 0)
        if host == "::1":
            socket.create_server((host, 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip(f"this machine has no address {host}")
    with linked(2, host=host) as links:
        assert at_once(lambda it: it.exchange(b"a"), links) == [[b"a", b"a"]] * 2


class Seen:
    """A store, and who else reads where rank 0 listens."""

    def __init__(self):
        self._store, self.told = HashStore(), threading.Event()

    def set(self, key, value):
        self._store.set(key, value)
        self.told.set()

    def get(self, key):
        return self._store.get(key)


def test_strangers_delay_no_rank_and_are_sent_away():
    store = Seen()
    with ThreadPoolExecutor(3) as threads:
        options = {"timeout_s": 20.0, "boot_s": 10.0}
        leading = threads.submit(Links, 0, 2, store, "127.0.0.1", **options)
        store.told.wait()
        port, token, _ = store.get("links").decode().split(":")

        def stranger(hello):
            it = socket.create_connection(("127.0.0.1", int(port)))
            it.settimeout(10)
            it.sendall(hello)
            return it

        known = bytes.fromhex(token)
        silent = [stranger(known[:n]) for n in (0, 0, 3, 16)]
        wrong = [
            stranger(struct.pack("<16sIB", *hello))
            for hello in [
                (bytes(16), 1, 0),
                (known, 0, 0),
                (known, 2, 1),
                (known, 2**32 - 1, 0),
                (known, 1, 2),
            ]
        ]
        assert [it.recv(1) for it in wrong] == [b""] * len(wrong)
        other = threads.submit(Links, 1, 2, store, "127.0.0.1", **options)
        links = [leading.result(5), other.result(5)]  # those that are silent may take 10 s
        assert [outcome(lambda it=it: it.recv(1)) for it in silent[:1]] == [b""]
        for it in (*links, *silent, *wrong):
            it.close()


def test_a_rank_whose_bytes_were_announced_too_early_is_not_sent_away():
    ours, other = socket.socketpair()
    with ours, other, socket.socket() as listener, _Reception(listener, bytes(16), 2) as reception:
        ours.setblocking(False)  # a read of it raises BlockingIOError
        reception._waiting[ours.fileno()] = ours, bytearray(), math.inf
        reception._read(ours.fileno())
        assert ours.fileno() in reception._waiting


def test_a_rank_that_never_comes_is_named_on_all():
    store = HashStore()

    def start(rank):
        return outcome(lambda: Links(rank, 4, store, "127.0.0.1", timeout_s=20, boot_s=0.3))

    def meet(rank):
        found = start(rank)
        if isinstance(found, Links):
            found._watch.failed.wait(30)
            found.close()
            return found.failure
        return found

    with own_time():
        texts = {str(it) for it in at_once(meet, [0, 1, 3])}
    assert texts == {"rank 2 has not connected within 0.3 s"}


class Called(HashStore):
    """A store that connects rank 1, and only the watch of rank 2, when rank 0 listens."""

    def set(self, key, value):
        super().set(key, value)
        self.open = [*call(self, "127.0.0.1", 1, 5.0).values()]
        port, token, _ = self.get(key).decode().split(":")
        self.open.append(socket.create_connection(("127.0.0.1", int(port)), 5))
        self.open[-1].sendall(struct.pack("<16sIB", bytes.fromhex(token), 2, Channel.WATCH))


def test_a_rank_whose_first_connection_failed_is_named():
    store = Called()
    with own_time():
        found, blame = meet(store, "127.0.0.1", 3, 0.2)
    for it in (*found.values(), *store.open):
        it.close()
    assert len(found) == 3 and blame == (2, "has not connected within 0.2 s")


def test_what_only_begins_like_a_loopback_address_is_none():
    loopback = ("localhost", "127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1")
    others = ("localhost.example.com", "127.example.com", "::1234", "10.0.0.1", "")
    assert all(map(is_loopback, loopback)) and not any(map(is_loopback, others))


def test_a_number_that_two_have_is_an_error():
    store = HashStore()

    def start(rank):
        found = outcome(lambda: Links(rank, 3, store, "127.0.0.1", timeout_s=20, boot_s=10))
        if isinstance(found, Links):
            found._watch.failed.wait(30)
            found.close()
            found = found.failure
        return found

    first, *_ = at_once(start, [0, 1, 1])
    assert str(first) == "rank 1 has connected twice: two processes have its number"


def test_an_unreachable_address_is_named():
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store.set("links", f"{port}:{bytes(16).hex()}:here")
    with pytest.raises(RankError, match="rank 0 cannot be reached at 127.0.0.1: "):
        Links(1, 2, store, "127.0.0.1", timeout_s=20, boot_s=1)


def test_a_store_that_vanishes_is_a_rank_error():
    class Gone:
        def set(self, *_):
            raise RuntimeError("Connection reset by peer")

        get = set

    for rank, text in ((0, "rank 0 cannot publish its address"), (1, "rank 0 cannot be reached")):
        with pytest.raises(RankError, match=text):
            Links(rank, 2, Gone(), "127.0.0.1", timeout_s=20, boot_s=1)


# Failures --------------------------------------------------------------------------------------


@pytest.fixture
def no_verdict(monkeypatch):
    """Wait less for a verdict of the watch, where none comes."""
    monkeypatch.setattr("gptmanager.ranks.links._VERDICT_S", 0.1)


def cut(links):
    """Cut the links as the death of a process does."""
    watch = links._watch
    watch._send = lambda rank, message: None
    for it in (*watch._connections.values(), *links._loops.values()):
        with socket.socket(fileno=os.dup(it.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def failures(links):
    for it in links:
        it._watch.failed.wait(30)
    return [str(it.failure) for it in links]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_that_dies_is_named_on_all_wherever_they_wait(size):
    with linked(size) as links:
        dead, others = links[-1], links[:-1]

        def wait(it):
            if it.rank == 0:
                return outcome(lambda: it.receive(from_rank=size - 1))
            return outcome(lambda: it.receive(may_be_woken=it.rank == 1))

        with ThreadPoolExecutor(size) as threads:
            work = [threads.submit(wait, it) for it in others]
            time.sleep(0.05)
            cut(dead)
            found = [it.result(30) for it in work]
    assert {type(it) for it in found} == {RankError}
    assert len({str(it) for it in found}) == 1
    assert str(found[0]).startswith(f"rank {size - 1} has died")


def test_a_suspended_rank_blames_no_other_for_that_time():
    """As all ranks do on a machine that was suspended."""
    bell = Wakener()
    watch = Watch(0, 1.0, bell, lambda: None)
    watch._connections, watch._heard = {1: SimpleNamespace(send=lambda *_: None)}, {1: 10.0}
    watch._excuse(0.2)  # a busy machine
    watch._excuse(5.0)
    watch._judge(15.9)
    assert watch.failure is None
    watch._judge(16.1)
    assert str(watch.failure) == "rank 1 has not been heard from for 1 s"
    bell.close()


def test_a_suspended_wait_does_not_time_out_for_that_time(monkeypatch):
    """Between two looks at the clock, at most a quarter of the limit counts."""
    now, reported = [0.0], []
    with linked(2, timeout_s=19.7) as links, monkeypatch.context() as patches:
        patches.setattr(clock, "monotonic", lambda: now[0])
        patches.setattr(own_links, "_VERDICT_S", 0)
        patches.setattr(links[1]._watch, "report_timeout", reported.append)
        links[1]._begin("a message")  # for 20 s, with the grace
        for now[0] in (1000, 1005, 1010, 1015):
            links[1]._between()
        assert not reported
        now[0] = 1016
        with pytest.raises(RankError, match="rank 1 has waited 19.7 s for a message, and all"):
            links[1]._between()
    assert reported == ["a message"]


@pytest.mark.parametrize("size", [2, 3])
def test_the_death_of_rank_0_ends_all(size):
    with linked(size) as links:
        cut(links[0])
        assert {text[:15] for text in failures(links[1:])} == {"rank 0 has died"}
        for it in links[1:]:
            for wait in (it.receive, it.check, lambda it=it: it.exchange(b"")):
                assert isinstance(outcome(wait), RankError)


def test_a_failed_rank_sends_its_reason_to_all():
    with linked(3) as links:
        error = ValueError("no such thing")
        links[2].fail(error, "ValueError: no such thing")
        assert set(failures(links[:2])) == {"rank 2 failed: ValueError: no such thing"}
        # that rank 0 blames it a rank may still hear before it has left
        assert str(links[2].failure or "rank 2 failed: ValueError: no such thing") in failures(
            links[:1]
        )
    with linked(3) as links:
        links[0].fail(error, "ValueError: no such thing")
        assert set(failures(links[1:])) == {"rank 0 failed: ValueError: no such thing"}


def test_closing_is_not_a_failure(no_verdict):
    with linked(3) as links:
        links[1].close()
        links[1].close()
        time.sleep(0.05)
        assert [it.failure for it in links] == [None] * 3
        links[0].close()
        time.sleep(0.05)
        assert [it.failure for it in links] == [None] * 3
        with pytest.raises(RankError, match="rank 2 has lost a message of rank 0"):
            links[2].receive()


def test_a_rank_that_is_not_heard_of_is_named_on_all():
    with linked(3, timeout_s=0.4) as links:
        stopped = links[1]._watch
        stopped._send_all = lambda message: None  # SIGSTOP has the same effect
        assert set(failures(links)) == {"rank 1 has not been heard from for 0.4 s"}  # itself, too
        judged, watch = [], links[0]._watch
        judge, watch._judge = watch._judge, lambda now: (judged.append(now), judge(now))
        began = time.monotonic()
        time.sleep(0.1)
        # it sleeps until the next beat or message
        assert len(judged) < 200 * (time.monotonic() - began)


def test_rank_0_that_was_stopped_learns_that_the_others_went():
    with linked(3, timeout_s=0.4) as links:
        links[0]._watch._send_all = lambda message: None
        assert set(failures(links)) == {"rank 0 has not been heard from for 0.4 s"}


@pytest.mark.parametrize("hangs", [0, *(pytest.param(it, marks=pytest.mark.slow) for it in (1, 2))])
def test_a_rank_that_keeps_others_waiting_is_named_on_all(hangs):
    """It is alive, and does something else."""
    with linked(3, timeout_s=0.3) as links:

        def wait(it):
            if it.rank == hangs:
                it._watch.failed.wait(30)
                return it.failure
            if it.rank:
                return outcome(it.receive)
            return outcome(lambda: it.receive(from_rank=hangs))

        found = at_once(wait, links)
    assert {type(it) for it in found} == {RankError}
    texts = {str(it) for it in found}
    assert len(texts) == 1
    assert texts.pop().startswith(f"rank {hangs} has kept the others waiting for 0.3 s (rank ")


def test_ranks_that_wait_for_each_other_end(no_verdict):
    with linked(2, timeout_s=0.3) as links:
        found = at_once(lambda it: outcome(lambda: it.receive(from_rank=1 - it.rank)), links)
    assert all(isinstance(it, RankError) for it in found)
    assert "all ranks wait for each other" in str(found[0]) + str(found[1])


def test_a_rank_that_does_not_read_what_is_sent_is_named():
    with linked(2, timeout_s=0.3) as links:
        with pytest.raises(RankError, match="rank 1 has kept the others waiting"):
            for _ in range(100):
                links[0].send(Message.INTAKE, bytes(1 << 20))


def test_resting_longer_than_the_timeout_is_not_a_failure():
    with linked(3, timeout_s=0.3) as links:
        with ThreadPoolExecutor(2) as threads:
            work = [threads.submit(it.receive, may_be_woken=True) for it in links[1:]]
            time.sleep(0.6)
            assert not any(it.done() for it in work)
            links[1].wake()
            assert work[0].result(30) is None
            links[0].send(Message.INTAKE, b"x")
            assert work[1].result(30) == (Message.INTAKE, b"x")
        assert [it.failure for it in links] == [None] * 3


def test_with_the_shortest_timeout_a_rank_is_heard_of_four_times_within_it(monkeypatch):
    now, beats = [0.0], []

    def poll(milliseconds):
        now[0] += milliseconds / 1000
        watch._is_closing = now[0] > 1
        return []

    def send(kind, message):  # the other rank answers at once
        beats.append(now[0])
        watch._heard[1] = now[0]

    polls = SimpleNamespace(register=lambda *_: None, poll=poll)
    monkeypatch.setattr(own_watch, "select", SimpleNamespace(poll=lambda: polls, POLLIN=1))
    monkeypatch.setattr(own_watch, "monotonic", lambda: now[0])
    bell = Wakener()
    watch = Watch(0, 0.1, bell, lambda: None)
    watch._connections = {1: SimpleNamespace(fileno=lambda: 99, send=send)}
    watch._heard = {1: 0.0}
    watch._watch()
    assert watch.failure is None
    assert max(after - before for before, after in pairwise(beats)) < 0.027
    bell.close()


def test_a_watch_that_breaks_ends_its_rank_and_the_others():
    with linked(3) as links:
        links[1]._watch._judge = None  # raises
        links[1]._watch.report_timeout("nothing")
        first, own, last = failures(links)
    assert own.startswith("rank 1 cannot watch the others: TypeError")
    assert first == last
    assert first.startswith("rank 1 ")


def test_what_a_rank_decided_otherwise_is_explained_by_rank_0():
    with linked(3) as links:
        links[0].explain_difference(lambda rank, data: f"{data} of {rank}")
        found = outcome(lambda: links[2].report_difference("went another way", b'{"a": 1}'))
        assert {str(found), *failures(links)} == {"rank 2 went another way: {'a': 1} of 2"}
    with linked(2) as links:
        links[0].explain_difference(lambda rank, data: 1 / 0)
        with pytest.raises(RankError, match="went: ZeroDivisionError"):
            links[1].report_difference("went", b"0")


# Collectives -----------------------------------------------------------------------------------


class Work:
    """`steps`: what each call of `wait` does; None: it returns. `completes`: the one after which
    it is completed.
    """

    def __init__(self, completes, *steps):
        self.steps, self.completes, self.calls = list(steps), completes, 0

    def is_completed(self):
        return self.calls >= self.completes

    def wait(self, timeout):
        self.calls += 1
        step = self.steps.pop(0)
        if step is not None:
            raise step


def test_a_collective_that_takes_longer_than_a_look_is_waited_for():
    late = RuntimeError("Operation timed out!")
    with linked(2) as links:
        links[0].wait(Work(3, late, late, None))
        links[0].wait(Work(1, late, None))  # completed just when the look timed out
        with pytest.raises(RankError, match="rank 0 has lost a collective: broken"):
            links[0].wait(Work(1, late, RuntimeError("broken")))


def test_a_collective_ends_when_a_rank_dies():
    with linked(3) as links:
        store = HashStore()
        groups = at_once(
            lambda rank: ProcessGroupGloo(PrefixStore("g", store), rank, 2, timedelta(seconds=1.5)),
            range(2),
        )
        work = groups[0].allreduce([torch.ones(2)])
        with ThreadPoolExecutor(1) as threads:
            waits = threads.submit(links[0].wait, work)
            time.sleep(0.05)
            cut(links[2])
            with pytest.raises(RankError, match="rank 2 has died"):
                waits.result(30)


# What is left ----------------------------------------------------------------------------------


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_open():
    def lives():
        with linked(3) as links:
            at_once(lambda it: it.exchange(b"a"), links)
        with linked(2) as links:
            links[1].fail(ValueError(), "ValueError")
            failures(links[:1])
        store = HashStore()

        def late(rank):
            found = outcome(lambda: Links(rank, 3, store, "127.0.0.1", timeout_s=20, boot_s=0.02))
            if isinstance(found, Links):
                found._watch.failed.wait(30)
                found.close()

        at_once(late, range(2))

    lives()
    before, threads = open_files(), threading.active_count()
    for _ in range(5):
        lives()
    assert open_files() <= before
    assert threading.active_count() <= threads
