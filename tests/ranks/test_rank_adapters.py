"""Requests with adapters on several ranks, against models into which their adapters are merged."""

from __future__ import annotations

import dataclasses

import pytest
from adapter_runs import V1, Run
from fuzz import FUZZ
from rank_managers import PATIENCE_S, rank_managers
from tuned_models import tuned

from gptmanager import GptManager
from gptmanager.callbacks import broadcast
from gptmanager.executor.forward_thread import ForwardThread
from gptmanager.testing import RecordingCallbacks


class RunOnRanks(Run):
    """One random configuration on a layout of ranks."""

    def run_on(self, monkeypatch, tensor, stages):
        hosts = {rank: RecordingCallbacks(self.requests()) for rank in range(1)}

        def make(rank, given):
            params = dataclasses.replace(self.params, parallel_config=given.parallel_config)
            host = hosts.setdefault(rank, RecordingCallbacks([]))
            get, poll = host.get_inference_requests, host.poll_stop_signal
            get, poll = broadcast(get, poll) if rank == 0 else broadcast()
            model = tuned(self.family).source
            first = model, self.model_type, self.beams, self.scheduler
            more = host.send_response, poll, host.return_batch_manager_stats
            return GptManager(*first, get, *more, params)

        with rank_managers(monkeypatch, make, tensor, stages) as managers:
            assert managers[0].wait_idle(PATIENCE_S)
            caches = [manager.audit() for manager in managers]
            assert all(it.ok and it.adapters == caches[0].adapters for it in caches)
            self.check_caches(managers[0])
        assert [manager.exception for manager in managers] == [None] * len(managers)
        self.count(hosts[0])
        return hosts[0]


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.every(3)
def test_random_mixes_on_ranks(monkeypatch, tensor, stages):
    done, seed, marks = 0, 40 * tensor + stages, []
    mark = ForwardThread.mark
    monkeypatch.setattr(ForwardThread, "mark", lambda self: marks.append(1) or mark(self))
    while done < FUZZ:
        seed += 1
        run = RunOnRanks(seed, 10)
        if stages > 1 and (run.params.run_ahead or run.model_type is V1):
            continue
        run.check_tokens(run.run_on(monkeypatch, tensor, stages))
        assert run.counts["misses"] + run.counts["hits"]
        done += 1
    assert bool(marks) == (stages > 1)  # what is written to the pages waits for forwards
