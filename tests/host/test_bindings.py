"""A host of the shape that `tensorrt_llm.bindings` had, with its import changed."""

from __future__ import annotations

import json
import pickle
import threading

import numpy as np
import pytest
import torch

import gptmanager
import gptmanager.bindings as tb
from gptmanager import FinishReason
from gptmanager.bindings.memory_counters import LastRecord
from gptmanager.errors import ConfigError
from gptmanager.testing import ScriptedModel

END_ID = 999


class Host:
    """Keeps requests in a list and answers by id, as such hosts did."""

    def __init__(self, requests=()):
        self.waiting = list(requests)
        self.answers = {}
        self.kinds = set()
        self.records = []
        self.all_final = threading.Event()
        self.num_expected = len(self.waiting)

    def fetch(self, max_num_sequences):
        fetched = []
        for _ in range(max_num_sequences):
            try:
                fetched.append(self.waiting.pop(0))
            except IndexError:
                break
        return fetched

    def respond(self, req_id, tensors, is_ok, err_msg):
        if is_ok:
            self.kinds.update(map(type, tensors))
            found = {item.name: item.tensor for item in tensors}
            self.answers[req_id] = (found, err_msg)
            if len(self.answers) >= self.num_expected:
                self.all_final.set()

    def should_stop(self):
        return set()

    def report(self, stats_json):
        self.records.append(json.loads(stats_json))

    @property
    def callbacks(self):
        return self.fetch, self.respond, self.should_stop, self.report

    def output(self, req_id):
        tensors, error = self.answers[req_id]
        assert not error
        length = tensors[tb.tensor_names.SEQUENCE_LENGTH].item()
        return tensors[tb.tensor_names.OUTPUT_IDS][0, 0, :length].tolist()


def model():
    """The next token is the last one plus 1."""
    return ScriptedModel(lambda history: (history[-1] + 1) % 1000)


def request(req_id, *, length=8, processor=None):
    made = tb.InferenceRequest(req_id, processor) if processor else tb.InferenceRequest(req_id)
    made.input_ids = torch.tensor([5, 6, 7], dtype=torch.int32)
    made.max_new_tokens = torch.tensor([[length]], dtype=torch.int32)
    made.end_id = torch.tensor([END_ID], dtype=torch.int32)
    made.pad_id = torch.tensor([END_ID], dtype=torch.int32)
    made.beam_width = torch.tensor([1], dtype=torch.int32)
    made.temperature = torch.tensor([1.0], dtype=torch.float32)
    made.min_length = torch.tensor([1], dtype=torch.int32)
    made.random_seed = torch.tensor([42], dtype=torch.int64)
    made.runtime_top_k = torch.tensor([0], dtype=torch.int32)
    made.runtime_top_p = torch.tensor([0.0], dtype=torch.float32)
    return made


def params(**keywords):
    made = tb.TrtGptModelOptionalParams(tb.KvCacheConfig(max_tokens=4096), **keywords)
    made.max_beam_width = 1
    made.scheduler_config = tb.executor.SchedulerConfig(
        tb.executor.CapacitySchedulerPolicy.MAX_UTILIZATION
    )
    return made


def only_42(req_id, logits, ids, stream, client_id):
    assert ids[0][:3] == [5, 6, 7] and client_id is None
    assert tuple(logits.shape) == (1, 1, 1000)
    stream.synchronize()
    logits[:] = float("-inf")
    logits[..., req_id] = 0


def test_three_cycles_of_a_host_with_a_processor_in_place():
    counters = tb.MemoryCounters.instance()
    assert counters.cpu == counters.gpu == counters.pinned == counters.uvm == 0
    for _ in range(3):
        host = Host([*(request(i) for i in range(8)), request(42, processor=only_42)])
        with tb.GptManager(
            model(), tb.TrtGptModelType.InflightBatching, *host.callbacks, params(), 10000
        ) as manager:
            assert host.all_final.wait(20)
            assert manager is not None
            assert counters.cpu > 0
        assert counters.cpu == 0

        assert [host.output(i) for i in range(8)] == [list(range(5, 16))] * 8
        assert host.output(42) == [5, 6, 7, *[42] * 8] and host.kinds == {tb.NamedTensor}
        assert host.records[0]["Context Requests"] == 9
        assert sum(record["Generation Requests"] for record in host.records) == 9 * 7


def test_the_older_order_of_arguments():
    host = Host([request(1)])

    with tb.GptManager(
        model(),
        tb.TrtGptModelType.InflightFusedBatching,
        1,
        tb.SchedulerPolicy.GUARANTEED_NO_EVICT,
        *host.callbacks,
        tb.TrtGptModelOptionalParams(),
        None,
        None,
        True,
    ):
        assert host.all_final.wait(20)

    assert host.output(1) == list(range(8, 16))  # the input is excluded


@pytest.mark.parametrize("names", ["older", "newer"])
def test_all_arguments_by_name(names):
    wide = request(2)
    wide.beam_width = torch.tensor([2], dtype=torch.int32)
    host = Host([request(1), wide])
    older = {"max_beam_width": 1, "scheduler_policy": tb.SchedulerPolicy.MAX_UTILIZATION}

    with tb.GptManager(
        trt_engine_path=model(),
        model_type=tb.TrtGptModelType.V1 if names == "newer" else gptmanager.ModelType.V1,
        get_inference_requests_cb=host.fetch,
        send_response_cb=host.respond,
        **({} if names == "newer" else {**older, "scheduler_policy": _STATIC}),
        optional_params=tb.TrtGptModelOptionalParams(
            scheduler_config=_STATIC_CONFIG, max_seq_len=64
        ),
    ):
        assert host.all_final.wait(20)

    assert len(host.output(1)) == 11
    assert "beam_width = 2 is outside 1..1" in host.answers[2][1]


def test_the_memory_of_a_manager_that_is_deleted_does_not_count():
    last = LastRecord()
    last.record = '{"Runtime CPU Memory Usage": 5}'
    tb.MemoryCounters.begin(last)
    assert tb.MemoryCounters.instance().cpu == 5
    del last  # the manager holds it, and was not shut down
    assert tb.MemoryCounters.instance().cpu == 0


_STATIC = tb.executor.CapacitySchedulerPolicy.STATIC_BATCH
_STATIC_CONFIG = tb.executor.SchedulerConfig(_STATIC)


@pytest.mark.parametrize("terminate_id", [10000, -1])
def test_a_fetched_request_ends_the_manager_after_the_running_ones(terminate_id):
    last = tb.InferenceRequest(terminate_id)
    host = Host([request(1, length=20), request(2, length=4), last, request(3)])
    host.num_expected = 2
    manager = tb.GptManager(
        model(), tb.TrtGptModelType.InflightBatching, *host.callbacks, params(), terminate_id
    )

    manager.wait_until_terminate()

    # what the same Get returned runs, too, and the id itself is never answered
    assert len(host.output(1)) == 23 and len(host.output(2)) == 7
    assert set(host.answers) == {1, 2, 3}
    assert tb.MemoryCounters.instance().cpu == 0
    manager.shutdown()


def test_get_is_called_no_more_after_the_id_came():
    calls = []

    def fetch(max_num_requests):
        calls.append(max_num_requests)
        return [tb.InferenceRequest(7)] if len(calls) == 3 else []

    host = Host()
    manager = tb.GptManager(
        model(), tb.TrtGptModelType.InflightBatching, fetch, *host.callbacks[1:], params(), 7
    )
    manager.wait_until_terminate()

    assert len(calls) == 3 and host.answers == {}


def test_requests_that_get_yields_before_it_raises_run_also_with_that_argument():
    def fetch(max_num_requests):
        if not host.answers and not began.is_set():
            began.set()
            yield request(1)
            raise LookupError("no queue")
        yield tb.InferenceRequest(7)

    host, began = Host(), threading.Event()
    host.num_expected = 1
    with tb.GptManager(
        model(), tb.TrtGptModelType.InflightBatching, fetch, *host.callbacks[1:], params(), 7
    ) as manager:
        manager.wait_until_terminate()
    assert len(host.output(1)) == 11


def test_without_that_argument_the_id_is_one_like_others():
    host = Host([request(-1)])

    with tb.GptManager(model(), tb.TrtGptModelType.InflightBatching, *host.callbacks, params()):
        assert host.all_final.wait(20)

    assert len(host.output(2**64 - 1)) == 11


def test_an_error_of_a_request_comes_as_text():
    wrong = request(1)
    wrong.input_ids = torch.tensor([5, 100000], dtype=torch.int32)
    host = Host([wrong, request(2)])

    with tb.GptManager(model(), tb.TrtGptModelType.InflightBatching, *host.callbacks, params()):
        assert host.all_final.wait(20)

    assert host.answers[1] == ({}, host.answers[1][1]) and "input_ids" in host.answers[1][1]
    assert len(host.output(2)) == 11


def test_a_stop_signal_ends_a_request_early():
    host = Host([request(1, length=1000)])
    host.should_stop = lambda: {1} if host.records else set()

    with tb.GptManager(model(), tb.TrtGptModelType.InflightBatching, *host.callbacks, params()):
        assert host.all_final.wait(20)

    reasons = host.answers[1][0]["finish_reasons"]
    assert reasons.tolist() == [[FinishReason.CANCELLED]]


def test_a_request_has_properties_that_may_be_unset():
    made = tb.InferenceRequest(3)
    assert made.input_ids is None and made.length_penalty is None
    made.length_penalty = torch.tensor([2.0])
    made.no_repeat_ngram_size = np.array([2])
    made.is_streaming = True

    again = pickle.loads(pickle.dumps(made))

    assert isinstance(again, tb.InferenceRequest) and again.request_id == 3 and again.is_streaming
    assert again.length_penalty.tolist() == [2.0]
    assert set(again.tensors) == {
        tb.tensor_names.LENGTH_PENALTY, tb.tensor_names.NO_REPEAT_NGRAM_SIZE,
    }  # fmt: skip
    with pytest.raises(AttributeError, match="inputs"):
        made.inputs = 1
    with pytest.raises(AttributeError, match="no property 'inputs'"):
        made.inputs  # noqa: B018
    made.logits_post_processor = only_42
    with pytest.raises(TypeError, match="logits_post_processor"):
        pickle.dumps(made)


def test_a_request_from_a_map_of_tensors():
    made = tb.InferenceRequest(3, {tb.tensor_names.INPUT_IDS: torch.tensor([1])})

    assert made.input_ids.tolist() == [1]


def test_named_tensors_take_the_tensor_first():
    named = tb.NamedTensor(torch.ones(1), "x")

    assert (named.name, named.tensor.tolist()) == ("x", [1.0])


def test_every_name_of_a_tensor_is_one_that_the_library_knows():
    known = gptmanager.InferenceRequest(1)
    for name, value in vars(tb.tensor_names).items():
        if name.isupper() and not name.startswith(("OUTPUT_", "SEQUENCE", "CUM_", "CONTEXT_")):
            if name != "GENERATION_LOGITS":
                setattr(known, value, None)


def test_optional_params_as_constructed_there():
    cache = tb.KvCacheConfig(10, [10], 0, 0.5, False)
    made = tb.TrtGptModelOptionalParams(
        cache, True, [0, 1], False, True, tb.PeftCacheManagerConfig()
    )

    assert made.kv_cache_config.free_gpu_memory_fraction == 0.5
    assert made.enable_trt_overlap and made.enable_chunked_context
    assert made.device_ids == [0, 1] and not made.normalize_log_probs
    assert made.gpu_weights_percent == 1
    default = tb.TrtGptModelOptionalParams()
    policies = tb.executor.CapacitySchedulerPolicy
    assert default.scheduler_config.capacity_scheduler_policy == policies.GUARANTEED_NO_EVICT
    assert default.scheduler_config.context_chunking_policy is None
    assert not default.enable_chunked_context and not default.max_beam_width
    assert pickle.loads(pickle.dumps(made)) == made
    assert pickle.loads(pickle.dumps(cache)) == cache
    with pytest.raises(AttributeError):
        made.enable_trt_overlapp = True


def refused(*, error=ConfigError, **keywords):
    host = Host()
    arguments = {"trt_engine_path": model(), "model_type": tb.TrtGptModelType.InflightBatching}
    arguments |= {"get_inference_requests_cb": host.fetch, "send_response_cb": host.respond}
    with pytest.raises(error) as caught:
        tb.GptManager(**{**arguments, **keywords})
    return str(caught.value)


def test_what_has_no_meaning_is_refused_by_name():
    assert "max_draft_tokens = 4" in refused(max_draft_tokens=4)
    assert "scheduler_policy must be a SchedulerPolicy, got 7" in refused(scheduler_policy=7)
    assert "device_ids" in refused(optional_params=tb.TrtGptModelOptionalParams(device_ids=[0]))
    windows = tb.TrtGptModelOptionalParams(tb.KvCacheConfig(max_attention_window=[8, 16]))
    assert "max_attention_window = [8, 16]" in refused(optional_params=windows)
    assert "of type dict" in refused(optional_params={"max_beam_width": 1})
    assert "get_inference_requests_cb" in refused(get_inference_requests_cb=None)
    assert "no argument 'engine'" in refused(error=TypeError, engine=1)


def test_arguments_that_do_not_fit():
    with pytest.raises(TypeError, match="'model_type' twice"):
        tb.GptManager("x", tb.TrtGptModelType.V1, model_type=1)
    with pytest.raises(TypeError, match="needs trt_engine_path, model_type"):
        tb.GptManager()
    with pytest.raises(TypeError, match="takes at most 12 arguments, got 13"):
        tb.GptManager(*range(13))


@pytest.mark.parametrize(
    ("name", "tells"),
    [
        ("GptSession", "through GptManager"),
        ("GptJsonConfig", "Hugging Face folder"),
        ("WorldConfig", "parallel_config"),
        ("SamplingConfig", "tensors of the request"),
        ("Nonsense", "has no Nonsense"),
    ],
)
def test_other_names_of_the_old_module_say_what_to_use(name, tells):
    with pytest.raises(AttributeError, match=tells):
        getattr(tb, name)
    assert name not in dir(tb)


def test_other_names_of_its_executor_say_what_to_use():
    with pytest.raises(AttributeError, match="has no Request: in place of an Executor"):
        _ = tb.executor.Request
