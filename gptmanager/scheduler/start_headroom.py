"""Whether a request may start beside others: a guard of policies that pause.

Who starts into the last free blocks takes them from those who need them next, and is soon paused
for it. Knows nothing of victims, nor of what happens to a request that must wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptmanager.kv_cache.manager import KvCacheManager
from gptmanager.request.llm_request import LlmRequest, LlmRequestState, RequestList

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE


@dataclass(slots=True, eq=False)
class StartHeadroom:
    """One pass of a scheduler, within its what-if.

    Beside others, a request starts only if the blocks stay free that it and those taken take in
    their next `steps` steps, or until their ends, and `resume_blocks` if it has been paused.
    """

    kv_cache_manager: KvCacheManager
    resume_blocks: int
    steps: int
    _counted: int = 0  # of those taken so far
    _growth: int = 0  # theirs

    def blocks_beside(self, request: LlmRequest, taken: RequestList) -> int:
        """Blocks that must stay free when `request` starts beside `taken`.

        `taken` only grows during a pass.
        """
        resume = self.resume_blocks if request.pause_count else 0
        if not self.steps:
            return resume
        if len(taken) > self._counted:
            self._growth += self._growth_of(taken[self._counted :])
            self._counted = len(taken)
        return max(resume, self._growth + self._growth_of([request]))

    def _growth_of(self, requests: RequestList) -> int:
        """Blocks that they take in the steps after this one, or until their ends."""
        steps, size = self.steps, self.kv_cache_manager.tokens_per_block
        growth, kept = 0, self.kv_cache_manager.max_kept_tokens
        for request in requests:
            stored = request.num_tokens
            if stored >= kept:
                continue
            end = request.prompt_len + request.max_new_tokens - 1
            if end > kept:
                end = kept
            last = stored + steps
            if last > end:
                last = end
            if last > stored:
                growth += ((last - 1) // size - (stored - 1) // size) * request.beam_width
        return growth


def is_started(request: LlmRequest) -> bool:
    """In generation, or in the context past its first chunk: it holds blocks to give."""
    state = request.state
    if state is _CONTEXT_INIT:
        return not request.is_first_context_chunk
    return state is _IN_PROGRESS or state is _TO_COMPLETE
