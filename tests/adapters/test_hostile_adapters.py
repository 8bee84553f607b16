"""Adapters that nobody should send: each is taken or refused, and a recording tells of all."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tuned_models import cache_of, tuned

from gptmanager import GptManager, InferenceRequest, KvCacheConfig, ModelType, OptionalParams
from gptmanager.executor.runner import Runner
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay
from gptmanager.testing import RecordingCallbacks

pytestmark = pytest.mark.timeout(120)


class Raises(torch.Tensor):
    """Whatever is done with it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise SystemExit("no")


class RaisesWhenRead(torch.Tensor):
    """It has a shape, and no numbers."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("__getitem__", "detach", "to", "copy_"):
            raise KeyboardInterrupt("no numbers")
        return super().__torch_function__(function, types, args, kwargs or {})


def made():
    return tuned("llama", (1, 4, 8))


def changed(weights, place, value):
    weights = weights.clone()
    weights[place] = value
    return weights


def same_weights(w):
    """The same numbers in other clothes."""
    return {
        "float64": w.double(),
        "with a gradient": torch.nn.Parameter(w.clone()),
        "a part of others": w.repeat(1, 2)[:, : w.shape[1]],
        "columns first": w.t().contiguous().t(),
        "with a batch dimension": w[None],
        "lists": w.tolist(),
        "tuples": tuple(map(tuple, w.tolist())),
        "numpy": w.numpy(),
        "long double": w.numpy().astype(np.longdouble),
        "big endian": w.numpy().astype(">f4"),
        "matrix": w.numpy().view(np.matrix),
        "backwards": np.ascontiguousarray(w.numpy()[:, ::-1])[:, ::-1],
        "with padding": torch.nn.functional.pad(w, (0, 9), value=torch.nan),
    }


def other_weights(w):
    """Good ones, too."""
    return {
        "float16": w.half(),
        "bfloat16": w.bfloat16(),
        "8 bits": w.to(torch.float8_e4m3fn),
        "one column, again and again": w[:, :1].expand(-1, 1 << 40),
        "one row, again and again": np.broadcast_to(w.numpy()[:1], w.shape),
    }


def bad_weights(w):
    """-> what the error says."""
    return {
        "integers": (w.int(), "lora_weights has dtype torch.int32, expected a float"),
        "bools": (w.bool(), "lora_weights has dtype torch.bool, expected a float"),
        "complex": (w.to(torch.complex64), "lora_weights has dtype torch.complex64"),
        "objects": (w.numpy().astype(object), "lora_weights has dtype object"),
        "records": (np.zeros(3, dtype=[("a", "f4")]), "lora_weights has dtype"),
        "nan": (changed(w, (0, 0), torch.nan), "lora_weights[0, 0] = nan is not finite"),
        "inf": (changed(w, (3, 1), -torch.inf), "lora_weights[3, 1] = -inf is not finite"),
        "too large": (w.double() * 1e300, "is not finite in torch.float32: at most 3.4"),
        "rows": (w[:1].expand(1 << 40, -1), "lora_weights has 1099511627776 rows, lora_config 12"),
        "sparse": (w.to_sparse(), "cannot be read: a torch.float32 tensor of layout torch.sparse"),
        "meta": (w.to("meta"), "torch.strided on meta"),
        "nothing": (None, "Cannot set nullptr when calling lora_weights"),
        "masked": (np.ma.masked_array(w.numpy()), "lora_weights is a masked array"),
        "a text": ("x", "lora_weights is of type str, expected numbers"),
        "one dimension": (w[0], "lora_weights has shape [352], expected [n, width]"),
        "ragged": ([[1.0], [1.0, 2.0]], "lora_weights cannot become a tensor"),
        "short": (w[:, :5], "lora_weights[0] has 5 elements"),
        "raises": (w.as_subclass(Raises), "SystemExit: no"),
        "raises when read": (w.as_subclass(RaisesWhenRead), "could not be read: KeyboardInterrupt"),
    }


BAD_CONFIGS = {
    "floats": ([[1.0, 0.0, 1.0]], "lora_config"),
    "bools": (np.ones((1, 3), bool), "lora_config has dtype bool"),
    "wide": ([[1, 0, 1, 0]], "lora_config has shape [1, 4], expected [n, 3]"),
    "very many": (torch.zeros(1, 3, dtype=torch.int32).expand(1 << 30, 3), "lora_config has shape"),
    "many": (torch.zeros(1, 3, dtype=torch.int32).expand(10**6, 3), "lora_config has 1000000 rows"),
    "no such module": ([[22, 0, 1]], "lora_config[0]: module_id = 22 is outside 0..21"),
    "not of the model": ([[9, 0, 1]], "module_id = 9 (cross_attn_q): the model has only 0"),
    "below": ([[1, -1, 1]], "lora_config[0]: layer_idx = -1 is less than 0"),
    "above": ([[1, 2, 1]], "lora_config[0]: layer_idx = 2 is outside 0..1"),
    "no rank": ([[1, 0, 0]], "lora_config[0]: adapter_size = 0 is less than 1"),
    "rank": ([[1, 0, 65]], "adapter_size = 65 is more than max_adapter_size = 64"),
    "rank of 63 bits": ([[1, 0, 2**62]], "is more than max_adapter_size = 64"),
    "rank of 80 bits": ([[1, 0, 2**80]], f"lora_config has the number {2**80}"),
    "twice": ([[1, 0, 1]] * 2, "1 (attn_q) of layer 0 is in row 0 already"),
}
IDS = [0, 2**64 - 1, [5], [[6]], torch.tensor(7), torch.tensor([8], dtype=torch.uint64)]
BAD_IDS = [2**64, -1, True, 1.5, "7", None, [1, 2], np.float32(7), torch.tensor(True)]


class Sent:
    """Requests by number, and what their errors must say; "": they have none."""

    def __init__(self) -> None:
        self.requests: list[InferenceRequest] = []
        self.names: list[str] = []
        self.errors: list[str] = []

    def add(self, name, error, **tensors):
        number = len(self.requests)
        tensors = {"input_ids": [1, 2, 3], "request_output_len": 4, **tensors}
        self.requests.append(InferenceRequest(number, tensors))
        self.names.append(name)
        self.errors.append(error)

    def add_lora(self, name, error, task, weights, config):
        pair = {"lora_weights": weights, "lora_config": config}
        self.add(name, error, lora_task_id=task, **pair)


def everything():
    sent = Sent()
    w, c = made().tensors[1]
    for name, weights in {"plain": w, **same_weights(w), **other_weights(w)}.items():
        sent.add_lora(name, "", 100 + len(sent.requests), weights, c)
    for name, (weights, error) in bad_weights(w).items():
        sent.add_lora(name, error, 100 + len(sent.requests), weights, c)
    for name, (config, error) in BAD_CONFIGS.items():
        weights = w[: len(config)] if len(config) < 9 else w
        sent.add_lora(f"config: {name}", error, 100 + len(sent.requests), weights, config)
    for task in IDS:
        sent.add_lora(f"id {task}", "", task, w, c)
    for task in BAD_IDS:
        sent.add_lora(f"id {task!r}", "lora_task_id", task, w, c)
    sent.add("no id", "Undefined tensor: lora_task_id", lora_weights=w, lora_config=c)
    sent.add("no config", "Undefined tensor: lora_config", lora_task_id=3, lora_weights=w)
    sent.add("no weights", "Undefined tensor: lora_weights", lora_task_id=3, lora_config=c)
    sent.add("not known", "AdapterError: lora_task_id 4 is not cached", lora_task_id=4)
    sent.add("of the base model", "")
    return sent


@pytest.mark.parametrize("is_file", [True, False], ids=["recording", "black box"])
def test_each_is_taken_or_refused_with_an_error(is_file, tmp_path, monkeypatch):
    path, sent = tmp_path / "run.jsonl", everything()
    host = RecordingCallbacks(sent.requests)
    before = {*threading.enumerate()}
    options = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=400, tokens_per_block=4),
        peft_cache_manager_config=cache_of("llama", 60, 20),
        max_batch_size=4,
        max_seq_len=40,
        exclude_input_in_output=True,
        recording_path=path if is_file else None,
        black_box_path=path,
        black_box_iterations=1000,
        max_step_failures=1,
    )
    with GptManager(
        made().source,
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=options,
        **host.keywords(),
    ) as manager:
        assert manager.wait_idle(60)
        assert manager.audit().ok
        if not is_file:
            monkeypatch.setattr(Runner, "run", lambda *_: 1 / 0)  # the loop fails
            host.submit(InferenceRequest(10**6, {"input_ids": [1], "request_output_len": 1}))
            assert host.final(10**6).error
    for thread in {*threading.enumerate()} - before:
        thread.join(30)
        assert not thread.is_alive()
    plain = None
    for number, (name, error) in enumerate(zip(sent.names, sent.errors, strict=True)):
        (response,) = host.of(number)
        assert (error in response.error) if error else not response.error, (name, response.error)
        if not error:
            text = response.tensors["output_ids"].flatten().tolist()
            plain = plain or text
            assert name not in same_weights(made().tensors[1][0]) or text == plain, name
    assert replay(read_recording(path)).divergence is None
    assert path.stat().st_size < 300_000


def test_a_recording_does_not_grow_with_the_weights(tmp_path):
    sizes = []
    for width in (400, 40_000):
        path = tmp_path / f"{width}.jsonl"
        weights, config = made().tensors[0]
        padded = torch.nn.functional.pad(weights, (0, width - weights.shape[1]))
        host = RecordingCallbacks()
        with GptManager(
            made().source,
            ModelType.INFLIGHT_FUSED_BATCHING,
            optional_params=OptionalParams(recording_path=path, max_seq_len=40),
            **host.keywords(),
        ):
            for number, value in enumerate((padded, padded.numpy(), padded.tolist())):
                tensors = {"input_ids": [1], "request_output_len": 1, "lora_task_id": number}
                tensors |= {"lora_weights": value, "lora_config": config}
                host.submit(InferenceRequest(number, tensors))
                assert not host.final(number).error
        assert replay(read_recording(path)).divergence is None
        sizes.append(path.stat().st_size)
    assert abs(sizes[0] - sizes[1]) < 3_000
