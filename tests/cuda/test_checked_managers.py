"""Whole managers in the check mode of the emulator: no kernel of a step has a race, reads memory
that nothing has written, or leaves its arguments.
"""

from __future__ import annotations

import pytest
from devices import finals, prompt, there_is

from gptmanager import InferenceRequest, KvCacheConfig
from gptmanager.assembly import assemble
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.device.streams import EmulatedStream

BEAMS = {"beam_width": 3, "return_log_probs": True}
TEXTS = {"num_return_sequences": 3, "temperature": 1.5, "random_seed": 7}
DRAFTS = {"draft_input_ids": [1, 2, 3]}
KINDS = {
    "beams": [BEAMS],
    "texts": [TEXTS],
    "drafts": [DRAFTS],
    "mixed": [BEAMS, TEXTS, DRAFTS, {}],
}


@pytest.mark.parametrize("order", ["forward", pytest.param("reverse", marks=pytest.mark.slow)])
@pytest.mark.parametrize(  # the mixed requests run alone, too, as some end before others
    "kind", [pytest.param(it, marks=() if it == "mixed" else pytest.mark.slow) for it in KINDS]
)
def test_no_kernel_of_a_step_has_a_race(kind, order, monkeypatch):
    device = there_is("emulator")
    launcher = EmulatorLauncher(check=True, order=order)
    monkeypatch.setattr(assemble, "EmulatedStream", lambda: EmulatedStream(launcher))
    requests = [
        # two of each, of which one fills its lines of the tables
        InferenceRequest.from_tokens(2 * i + j, prompt(9 * i + j, 19), 5 - j, **options)
        for i, options in enumerate(KINDS[kind])
        for j in range(2)
    ]
    found = finals(
        requests, device, max_beam_width=3, max_seq_len=24, cache=KvCacheConfig(max_tokens=1024)
    )
    assert [response.error for response in found] == [""] * len(requests)
