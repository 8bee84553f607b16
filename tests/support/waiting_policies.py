"""Policies whose reasons for waiting are compared."""

from __future__ import annotations

from loop_driver import no_evict

from gptmanager.scheduler import MaxUtilizationScheduler, StaticBatchScheduler


def guarded(max_num_requests, kv_cache, **options):
    return MaxUtilizationScheduler(
        max_num_requests,
        kv_cache,
        max_pauses=3,
        resume_headroom_blocks=1,
        start_headroom_steps=16,
        **options,
    )


def static(max_num_requests, kv_cache, **options):
    return StaticBatchScheduler(max_num_requests, kv_cache, started_contexts_first=True, **options)


POLICIES = {
    "no_evict": no_evict,
    "static": static,
    "max_utilization": MaxUtilizationScheduler,
    "guarded": guarded,
}
