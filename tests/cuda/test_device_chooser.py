"""Choices that a device makes: those of the CPU, and nothing waits for them before the result."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from devices import check_same, finals, prompt, set_token_sizes

from gptmanager import InferenceRequest
from gptmanager.assembly import assemble
from gptmanager.callbacks import BannedTokens, TokenBias, Watermark
from gptmanager.config import PromptLookup
from gptmanager.cuda.device import downloads
from gptmanager.cuda.device.streams import DeviceStream
from gptmanager.decoding.lines import Lines
from gptmanager.executor.choice import device_chooser
from gptmanager.executor.choice.device_chooser import DeviceChooser
from gptmanager.executor.choice.top_tokens import TopTokens
from gptmanager.executor.device_runner import DeviceRunner
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.executor.step_in_flight import SamplingRows
from gptmanager.executor.torch_executor import TorchExecutor
from gptmanager.step import Row

pytestmark = pytest.mark.every(2)

from_tokens = InferenceRequest.from_tokens


class WatchedStream(DeviceStream):
    """A GPU's, with `waits` as those of a `SeparateStream`: torch says where a step waits."""

    def __init__(self, *where):
        super().__init__(*where)
        self.waits = []

    @contextlib.contextmanager
    def watch(self):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        texts = [str(warning.message) for warning in warned]
        self.waits += [text for text in texts if "called a synchronizing" in text]


@pytest.fixture
def watched(device, request, monkeypatch):
    """All streams that are made."""
    if device == "emulator":
        return request.getfixturevalue("separate")
    streams = []

    def make(*where):
        streams.append(WatchedStream(*where))
        return streams[-1]

    def inside(method):
        def run(self, step):
            if not isinstance(self.runner, DeviceRunner):
                return method(self, step)
            with streams[-1].watch():
                return method(self, step)

        return run

    monkeypatch.setattr(assemble, "DeviceStream", make)
    for name in ("forward", "sample"):
        monkeypatch.setattr(TorchExecutor, name, inside(getattr(TorchExecutor, name)))
    return streams


def check(device, watched, requests, waits=False, **options):
    options.setdefault("run_ahead", 1)
    found = check_same(device, requests, **options)
    found_waits = watched[-1].waits[:]
    watched[-1].waits.clear()  # they were expected
    assert bool(found_waits) is waits, found_waits
    return found


def forbid(request_id, logits, tokens, stream, client_id):
    logits[..., tokens[0][-1]] = -torch.inf


def replace(request_id, logits, tokens, stream, client_id):
    return logits.flip(-1)


class Batched:
    """Its rule depends on the whole history."""

    def process_batch(self, request_ids, logits, tokens, stream, client_ids):
        for own, beams in zip(logits, tokens, strict=True):
            for place, history in enumerate(beams):
                own[0, place, sum(history) % 90] += 5.0


banned, bias, watermark = BannedTokens(8), TokenBias(8), Watermark(5)


def plain():
    return [from_tokens(i, prompt(i, 7 + 5 * i), 4, temperature=0.5 * (i % 3)) for i in range(5)]


def processed():
    shared = Batched()
    own = [forbid, shared, replace, None, shared, banned.bind([3, 10, 17]), watermark.bind()]
    return [
        from_tokens(
            *(i, prompt(i, 6 + 3 * i), 5),
            logits_post_processor=processor,
            temperature=0.7 * (i % 2),
            return_log_probs=i > 3,
        )
        for i, processor in enumerate(own)
    ]


def wanted():
    """Logits are raw, whatever is done to them afterwards."""
    options = [
        {"return_generation_logits": True},
        {"return_generation_logits": True, "repetition_penalty": 1.5},
        {},
        {"return_context_logits": True, "return_log_probs": True},
        {"return_generation_logits": True, "logits_post_processor": replace},
        {"return_context_logits": True, "return_generation_logits": True, "temperature": 0.6},
        {"num_top_log_probs": 3, "return_log_probs": True},
    ]
    return [from_tokens(i, prompt(i, 5 + 4 * i), 3, **own) for i, own in enumerate(options)]


def texts():
    """Several of a prompt, beside searches, and one of each with all that changes logits."""
    drawn = {"num_return_sequences": 3, "temperature": 0.9}
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.2}
    return [
        from_tokens(1, prompt(1, 9), 4, **drawn),
        from_tokens(2, prompt(2, 12), 5, **drawn, **penalties, return_log_probs=True),
        from_tokens(3, prompt(3, 15), 4, beam_width=2, return_log_probs=True),
        from_tokens(4, prompt(4, 8), 5, temperature=0.8, random_seed=4),
        from_tokens(5, prompt(5, 14), 4, **drawn, logits_post_processor=Batched()),
        from_tokens(6, prompt(6, 11), 4, **drawn, return_generation_logits=True),
        from_tokens(7, prompt(7, 11), 4, beam_width=3, logits_post_processor=Batched()),
    ]


def mixed():
    """A long one that wants a token a step, beside one after the other of those."""
    others = [
        {"repetition_penalty": 1.4},
        {"temperature": 0.8, "runtime_top_p": 0.9, "random_seed": 3},
        {"return_log_probs": True},
        {"temperature": 1.2, "runtime_top_k": 4, "random_seed": 4},
        {"return_generation_logits": True},
        {"runtime_min_p": 0.1, "temperature": 2.0, "random_seed": 6},
        {"logits_post_processor": replace},
    ]
    rest = [from_tokens(i, prompt(i, 5 + i), 2, **own) for i, own in enumerate(others, start=1)]
    return [from_tokens(0, prompt(0, 9), 15), *rest]


def test_cuda_graphs_choose_tokens_of_plain_requests(device, watched, monkeypatch):
    """Others of their steps choose as if nothing had been recorded."""
    ways = []

    def spy(name, way):
        method = getattr(DeviceChooser, name)

        def run(self, *arguments):
            ways.append(way)
            return method(self, *arguments)

        monkeypatch.setattr(DeviceChooser, name, run)

    spy("_download", "recorded")
    spy("_enqueue", "launched")
    check(device, watched, mixed, max_batch_size=2)
    turns = [one for one, other in zip(ways, ways[1:], strict=False) if one != other]
    assert len(turns) >= 6 and ways.count("recorded") >= 4


@pytest.mark.every(2)
@pytest.mark.parametrize("requests", [plain, processed, wanted])
def test_nothing_waits_for_a_choice(device, watched, requests):
    check(device, watched, requests)


def test_nothing_waits_for_many_starts_of_one_processor(device, watched):
    """All in one step."""
    shared = BannedTokens(8)

    def requests():
        own = [shared.bind([3 * i, 10, 17]) for i in range(8)]
        return [from_tokens(i, prompt(i, 5), 3, logits_post_processor=own[i]) for i in range(8)]

    check(device, watched, requests, max_batch_size=8)


@pytest.mark.every(2)
@pytest.mark.parametrize("requests", [plain, wanted])
def test_logits_of_16_bits(device, watched, requests):
    """Results equal those of the same logits in float32, whether or not requests read floats."""
    found = finals(requests(), device, dtype="bfloat16", run_ahead=1)
    watched[-1].waits.clear()
    widened = finals(requests(), device, dtype="bfloat16", run_ahead=1, cuda_graphs=False)
    for one, other in zip(found, widened, strict=True):
        assert not one.error
        for name, tensor in other.tensors.items():
            assert name == "request_metrics" or torch.equal(one.tensors[name], tensor), name


@pytest.mark.parametrize(
    ("requests", "dtype"),
    [(plain, torch.bfloat16), (wanted, torch.float32), (processed, torch.float32)],
)
def test_only_steps_whose_logits_are_read_widen_them(device, monkeypatch, requests, dtype):
    """Post-processors and hosts read float32, kernels read what the model has computed."""
    enqueue, dtypes = DeviceChooser._enqueue, []

    def spy(self, rows, logits, *rest):
        dtypes.append(logits.dtype)
        return enqueue(self, rows, logits, *rest)

    monkeypatch.setattr(DeviceChooser, "_enqueue", spy)
    finals(requests(), device, dtype="bfloat16")
    assert dtypes[0] is dtype


def test_log_probs_after_the_end_of_a_request_with_top_log_probs(device, watched):
    def requests():
        options = {"num_top_log_probs": 3}, {"return_log_probs": True}, {}
        return [from_tokens(i, prompt(i, 9), 2 + 3 * i, **options[i]) for i in range(3)]

    check(device, watched, requests)


def test_only_the_choices_of_rows_with_one_beam_are_written():
    """Those of beams are written by the next fork, which knows their parents."""
    lines, found = Lines(2, 2), []
    tables = DeviceTables(lines.count, 8, 1, torch.device("cpu"))
    uploads = SimpleNamespace(upload=lambda arrays: [*map(torch.from_numpy, arrays)])
    sampler = SimpleNamespace(enqueue=lambda *given: found.append(given[4]))
    chooser = DeviceChooser(lines, tables, sampler, None, uploads=uploads, downloads=None)
    rows = Row(1, 0, 0, 3, 1, True, beam_width=2), Row(2, 0, 1, 5, 1, True)
    places = (np.array(it) for it in ([0, 1], [0, 2, 3], [0, 1, 2], [4, 4, 6]))
    chooser._enqueue(SamplingRows(rows, *places), torch.zeros(3, 9), None, np.zeros(2, int), None)
    assert found[0].tolist() == [-1, -1, 2 * 8 + 6]


def test_nothing_waits_for_beams(device, watched):
    check(device, watched, texts, max_beam_width=3)


def test_a_search_too_wide_for_the_kernel_is_the_hosts(device, watched, monkeypatch):
    monkeypatch.setattr("gptmanager.executor.choice.device_chooser.MAX_CONTINUATIONS", 2)
    check(device, watched, texts, waits=True, max_beam_width=3)


def test_the_widest_search_of_the_kernel_is_not_the_hosts(device, watched, monkeypatch):
    counts = []
    load = DeviceChooser.load

    def spy(self, start):
        counts.append(start.num_candidates)
        load(self, start)

    monkeypatch.setattr(DeviceChooser, "load", spy)
    check(device, watched, texts, max_beam_width=3)
    monkeypatch.setattr("gptmanager.executor.choice.device_chooser.MAX_CONTINUATIONS", max(counts))
    check(device, watched, texts, max_beam_width=3)


def test_top_tokens_are_ranked_by_their_exact_log_probs():
    """Those of a search by its scores. A row that asks for fewer has ids of -1."""
    firsts = np.array([0, 1, 2, 3])
    rows = SamplingRows((), firsts[:3], firsts, firsts[:3], firsts[:3])
    top = TopTokens(rows, np.array([3, 0, 2], dtype=np.int32))
    ids = np.array([[5, 0, 3, 9], [-1, -1, -1, -1], [7, 0, -1, -1]], dtype=np.int32)
    exact = np.array([[-1, -1, -0.5], [0, 0, 0], [0, 0, 0]], dtype=np.float32)
    scores = np.array([[0, 0, 0, 0], [0, 0, 0, 0], [-3, -0.25, 0, 0]], dtype=np.float32)
    device_chooser._put(top, exact, np.array([False, False, True]), ids, scores)
    found = [(it.row, it.ids.tolist(), it.log_probs.tolist()) for it in top.by_row()]
    assert found == [(0, [[3, 0, 5]], [[-0.5, -1, -1]]), (2, [[0, 7]], [[-0.25, -3]])]


def test_huge_logits_are_waited_for(device, watched, monkeypatch):
    monkeypatch.setattr(downloads, "MOST_BYTES", 100)
    check(device, watched, wanted, waits=True)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_nothing_waits_for_drafts(device, watched, run_ahead):
    """Neither where penalties read them as history."""

    def requests():
        text = prompt(4, 12)
        options = [
            {},
            {"repetition_penalty": 1.2, "return_log_probs": True},
            {"temperature": 0.7, "random_seed": 3, "return_generation_logits": True},
            {"no_repeat_ngram_size": 6, "min_length": 5, "end_id": 7},
        ]
        return [from_tokens(i, text * 2 + text[: 4 + i], 8, **options[i]) for i in range(4)]

    lookup = PromptLookup(max_draft_tokens=4)
    check(device, watched, requests, speculative_decoding_config=lookup, run_ahead=run_ahead)


def drafted(*options):
    """Requests whose drafts are right for a while, and one that has none and a processor."""
    found = finals([from_tokens(i, prompt(i, 9), 8) for i in range(len(options))], "cpu")
    drafts = [final.tensors["output_ids"][0, 0, 9:].tolist() for final in found]

    def requests():
        return [
            from_tokens(i, prompt(i, 9), 8, draft_input_ids=[*drafts[i][1 : 2 + 2 * i], 5], **own)
            for i, own in enumerate(options)
        ] + [
            from_tokens(8, prompt(8, 9), 6, logits_post_processor=forbid),
            from_tokens(9, prompt(9, 9), 6, num_return_sequences=2, temperature=1.0),
        ]

    return requests


def test_drafts_of_a_host_next_to_rows_of_other_kinds(device, watched):
    requests = drafted({}, {"return_log_probs": True}, {"frequency_penalty": 0.1})
    check(device, watched, requests, max_beam_width=2)


def test_drafts_that_depend_on_one_another_are_verified_by_the_host(device, watched):
    requests = drafted({"logits_post_processor": forbid}, {"return_context_logits": True})
    check(device, watched, requests, waits=True, max_beam_width=2)


def test_drafts_that_were_drawn_from_few_tokens(device, watched):
    """All others are -inf."""

    def requests():
        found = []
        for i in range(6):
            logits = torch.full((3, 96), -torch.inf)
            logits[:, i : i + 40] = torch.linspace(0, 3, 40)
            own = {"temperature": 1.5, "draft_input_ids": [i + 39, i + 30, i + 35]}
            own |= {"draft_logits": logits, "return_log_probs": True}
            found.append(from_tokens(i, prompt(i, 9), 6, **own))
        return found

    check(device, watched, requests, waits=True)


@pytest.mark.parametrize("sizes", [(), (96,)], ids=["launched", "captured"])
def test_drafts_without_room_are_verified_where_their_tokens_are_chosen(
    device, watched, sizes, monkeypatch
):
    """The first step has no room for the drafts; later drafts are found in the prompt."""
    set_token_sizes(monkeypatch, *sizes)

    def requests():
        own = {"temperature": 1.5, "draft_input_ids": [1, 2, 3]}
        own["draft_logits"] = torch.linspace(0, 1, 96).expand(3, -1).clone()
        return [from_tokens(1, [*range(96)], 8, **own)]

    options = {"enable_chunked_context": True, "max_num_tokens": 96}
    lookup = PromptLookup(max_draft_tokens=4, min_ngram=1)
    check(device, watched, requests, waits=True, speculative_decoding_config=lookup, **options)


def test_a_processor_that_fails_ends_its_request_alone(device, watched):
    calls = []

    def failing(request_id, logits, tokens, stream, client_id):
        calls.append(len(tokens[0]))
        if len(tokens[0]) > 13:
            logits.fill_(torch.nan)
            raise OSError("no")

    def requests(own):
        return [
            from_tokens(1, prompt(1, 10), 8),
            from_tokens(2, prompt(2, 10), 8, logits_post_processor=own),
            from_tokens(3, prompt(3, 10), 8, logits_post_processor=forbid),
            from_tokens(4, prompt(4, 10), 8, temperature=0.8, return_log_probs=True),
        ]

    found = finals(requests(failing), device, run_ahead=1)
    expected = finals(requests(None), device, run_ahead=1)
    assert "OSError" in found[1].error and calls == [10, 11, 12, 13, 14]
    assert not watched[0].waits
    for place in (0, 2, 3):
        assert not found[place].error
        ids = [finals_of[place].tensors["output_ids"] for finals_of in (found, expected)]
        assert torch.equal(*ids)


def test_logits_are_the_hosts_to_keep_and_to_write_to(device, watched):
    """One host destroys what it gets; what others have got stays as it is."""
    first = finals(wanted(), device, run_ahead=1)
    second = finals(wanted(), device, run_ahead=1)
    kept = [final.tensors["generation_logits"].clone() for final in second if final.tensors]
    for final in first:
        for tensor in final.tensors.values():
            tensor.zero_()
    for final, tensor in zip(second, kept, strict=True):
        assert not tensor.is_inference()
        assert torch.equal(final.tensors["generation_logits"], tensor)
