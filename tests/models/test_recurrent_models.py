"""Each feature of a manager with a model that keeps a state: it works, or is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import merge, random_pair, save_adapter
from checkpoints import PagedDriver, checkpoint, is_greedy, random_model
from family_configs import FAMILY_CONFIGS
from guided_requests import asked
from guided_requests import serve as serve_guided
from odd_configs import family_config
from safetensors.torch import save_file
from text_checkpoint import END_ID, byte_tokenizer
from torch import Tensor

from gptmanager import (
    Delivered,
    GptManager,
    GuidedDecoding,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    ParallelConfig,
    PromptLookup,
)
from gptmanager.callbacks import load_peft_adapter
from gptmanager.errors import ConfigError
from gptmanager.kernels.gemm.weight_quantization import round_to_groups, round_to_int8
from gptmanager.loop.responses import REQUEST_METRICS
from gptmanager.memory.weights import Weights
from gptmanager.models import load_model
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay
from gptmanager.server.engine.model_card import ModelCard
from gptmanager.testing import RecordingCallbacks

pytest.importorskip("transformers", reason="transformers is not installed")
FUSED = ModelType.INFLIGHT_FUSED_BATCHING
CONFIG = {
    **FAMILY_CONFIGS["qwen3_5_text"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "vocab_size": END_ID + 1,
    "layer_types": ["linear_attention", "full_attention"],
}
PROMPTS = [[7, 3, 90, 21, 4] * 5, [1], [5, 6, 5], [*range(30, 47)]]
LENGTH = 12
Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(CONFIG)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("recurrent")
    config, state = checkpoint(model)
    (found / "config.json").write_text(json.dumps(config))
    save_file({n: it.contiguous() for n, it in state.items()}, found / "model.safetensors")
    byte_tokenizer().save(str(found / "tokenizer.json"))
    return found


@pytest.fixture(scope="module")
def greedy(folder: Path, model: Any) -> list[list[int]]:
    """The tokens of each prompt, alone; transformers gives the same."""
    found = [outputs(folder, [prompt])[0] for prompt in PROMPTS]
    for prompt, own in zip(PROMPTS, found, strict=True):
        assert is_greedy(model, prompt, own)
    return found


CACHE = {"enable_block_reuse": None, "tokens_per_block": 8, "max_tokens": 512}


def options_of(**more: Any) -> OptionalParams:
    """Options under which prompts are cut into chunks."""
    cache = KvCacheConfig(tokens_per_block=8, max_tokens=512)
    return OptionalParams(
        **{
            **{"kv_cache_config": cache, "max_batch_size": 4, "max_num_tokens": 16},
            **{"enable_chunked_context": True, "exclude_input_in_output": True, **more},
        }
    )


def requests_of(prompts: Sequence[Sequence[int]], **more: Any) -> list[InferenceRequest]:
    return [
        InferenceRequest.from_tokens(number, prompt, LENGTH, **more)
        for number, prompt in enumerate(prompts)
    ]


def outputs(source: Any, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    return tokens_of(source, requests_of(prompts), **options)


def tokens_of(source: Any, requests: list[InferenceRequest], **options: Any) -> list[list[int]]:
    host = RecordingCallbacks(requests)
    with GptManager(
        source, FUSED, optional_params=options_of(**options), **host.keywords()
    ) as manager:
        assert manager.wait_idle(60)
    finals = [host.final(request.request_id) for request in requests]
    assert [final.error for final in finals if final.error] == []
    return [host.output(request.request_id) for request in requests]


def with_quantized(state: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The floats that these weights are in 8 or 4 bits; gates, norms and embeddings stay."""
    found = dict(state)
    for name, own in state.items():
        if own.ndim != 2 or any(part in name for part in ("embed", "in_proj_a", "in_proj_b")):
            continue
        if kind == "int8" or "lm_head" in name:
            integers, scales = round_to_int8(own)
            found[name] = integers * scales.unsqueeze(1)
        else:
            found[name] = round_to_groups(own).floats()
    return found


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_in_8_and_4_bits(model: Any, folder: Path, kind: Any) -> None:
    config, state = checkpoint(model)
    narrow = load_model(folder, dtype="float32", weights_dtype=kind)
    exact = load_model((config, with_quantized(state, kind)), dtype="float32")
    driver, others = PagedDriver(narrow, 1), PagedDriver(exact, 1)
    for chunk in (PROMPTS[0][:16], PROMPTS[0][16:], [9], [8]):
        found, right = driver.forward([(0, chunk)]), others.forward([(0, chunk)])
        # tokens are quantized, too
        assert (found - right).std() < 0.05 * right.std()
    own = {"weights_dtype": kind, "deterministic": True}
    alone = [outputs(folder, [prompt], **own)[0] for prompt in PROMPTS]
    assert outputs(folder, PROMPTS, **own) == alone


@pytest.mark.parametrize("name", ["granitemoehybrid", "lfm2", "nemotron_h", "qwen3_5_text"])
def test_each_turn_of_a_chat_begins_with_a_snapshot(name: str) -> None:
    own = {**FAMILY_CONFIGS[name], "model_type": name, "num_hidden_layers": 4}
    model = random_model(own)
    host, text, found = RecordingCallbacks(), [], []
    params = options_of(kv_cache_config=KvCacheConfig(**CACHE))
    given = checkpoint(model), FUSED
    with GptManager(*given, optional_params=params, **host.keywords()) as manager:
        host.manager = manager
        for number, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
            text += [token % 90 for token in prompt]
            host.submit(InferenceRequest.from_tokens(number, text, LENGTH))
            metrics = host.final(number, 60).tensors["request_metrics"]
            found.append(int(metrics[REQUEST_METRICS.index("cached_tokens")]))
            assert is_greedy(model, text, host.output(number))
            text += host.output(number)
        assert manager.audit().ok
    lengths = [25, 26, 29, 46]  # prompts grow by the earlier turns
    ends = [length + LENGTH * number - 1 for number, length in enumerate([*lengths], 1)]
    assert found == [0, *(end - end % 8 for end in ends)]


def test_prompt_tables_and_replay(model: Any, folder: Path, tmp_path: Path, greedy: Any) -> None:
    """A table of a token's own embeddings gives the tokens of the prompt; the run replays."""
    table = model.get_input_embeddings().weight.detach()[None, :128].clone()
    virtual = [[token + END_ID + 1 if token % 2 else token for token in it] for it in PROMPTS]
    requests = requests_of(virtual, prompt_embedding_table=table)
    requests.append(InferenceRequest.from_tokens(99, [4, 5], 30, temperature=1.0, random_seed=3))
    path = tmp_path / "run.jsonl"

    found = tokens_of(folder, requests, recording_path=path, max_batch_size=3)
    assert found[:-1] == greedy
    report = replay(read_recording(path))
    assert report.divergence is None and report.compared > LENGTH


def test_guided_decoding(folder: Path) -> None:
    guided, tokenizer = GuidedDecoding(byte_tokenizer(), [END_ID]), byte_tokenizer()
    patterns = [r"[a-c]{9,20} (had|lost) \d\.", r"(xy){3,9}z", r"[A-Z][a-z]{2,5}!"]
    requests = [
        asked(tokenizer, number, guided.regex(pattern), end_id=END_ID)
        for number, pattern in enumerate(patterns)
    ]
    host = serve_guided(requests, folder, max_tokens=64, max_num_tokens=16)
    for number, pattern in enumerate(patterns):
        text = tokenizer.decode([it for it in host.output(number) if it != END_ID])
        assert re.fullmatch(pattern, text), text


class Dying:
    """A host that copies the journal when it has some responses, as if the process died then."""

    def __init__(self, requests: list[InferenceRequest], journal: Path, at: int = -1) -> None:
        self.waiting, self.journal, self.at = requests, journal, at
        self.tokens: dict[int, list[int]] = {}
        self.had: dict[int, int] = {}
        self.numbers = count(1)

    def get(self, room: int) -> list[InferenceRequest]:
        taken, self.waiting = self.waiting, []
        return taken

    def send(self, request_id: int, tensors: Any, is_final: bool, error: str) -> None:
        assert not error
        own = self.tokens.setdefault(request_id, [])
        own += next(it.tensor for it in tensors if it.name == "output_ids").flatten().tolist()
        if next(self.numbers) == self.at:
            shutil.copytree(self.journal, f"{self.journal}-copy")
            self.had = {number: len(tokens) for number, tokens in self.tokens.items()}

    def run(self, folder: Path, had: Mapping[int, int]) -> None:
        params = options_of(
            journal_path=self.journal,
            restore_cb=lambda number: Delivered(had.get(number, 0), False),
        )
        given = folder, FUSED, 1, None, self.get, self.send
        with GptManager(*given, optional_params=params) as manager:
            assert manager.wait_idle(60)


def test_a_journal_resumes(folder: Path, tmp_path: Path, greedy: Any) -> None:
    journal = tmp_path / "journal"
    first = Dying(requests_of(PROMPTS, is_streaming=True), journal, at=15)
    first.run(folder, {})
    assert [first.tokens[number] for number in range(4)] == greedy
    assert 0 < sum(first.had.values()) < 4 * LENGTH
    second = Dying([], Path(f"{journal}-copy"))
    second.run(folder, first.had)
    for number, tokens in enumerate(greedy):
        assert tokens[: first.had.get(number, 0)] + second.tokens[number] == tokens


def test_a_window_is_that_of_the_layers_with_attention(model: Any, folder: Path) -> None:
    window, text = 6, [*PROMPTS[0], *PROMPTS[3]]
    places = torch.arange(len(text))
    ages = places[:, None] - places
    seen = torch.zeros(ages.shape).masked_fill((ages < 0) | (ages >= window), -torch.inf)
    masks = {"full_attention": seen[None, None], "linear_attention": None}
    with torch.no_grad():
        exact = model(torch.tensor([text]), attention_mask=masks, use_cache=False).logits[0]
    driver = PagedDriver(load_model(folder, dtype="float32", attention_window=window), 1)
    found = torch.cat([driver.forward([(0, own)]) for own in (text[:20], text[20:41], text[41:])])
    assert (found - exact).abs().max() < 2e-4 * exact.std()
    cache = KvCacheConfig(tokens_per_block=8, max_tokens=2048, max_attention_window=window)
    own = {"kv_cache_config": cache, "max_num_tokens": 256}  # the least chunk with a window
    alone = [outputs(folder, [prompt], **own)[0] for prompt in PROMPTS]
    assert outputs(folder, PROMPTS, **own) == alone


def test_sleep_and_new_weights(model: Any, folder: Path, greedy: Any) -> None:
    state = checkpoint(model)[1]
    other = {n: it + torch.randn_like(it) / 20 for n, it in state.items()}
    expected = outputs((checkpoint(model)[0], other), PROMPTS)
    assert expected != greedy
    host, numbers = RecordingCallbacks(), count()

    def run() -> list[list[int]]:
        own = [next(numbers) for _ in PROMPTS]
        for number, prompt in zip(own, PROMPTS, strict=True):
            host.submit(InferenceRequest.from_tokens(number, prompt, LENGTH))
        return [host.final(it, 60).tensors["output_ids"].flatten().tolist() for it in own]

    own = options_of(kv_cache_config=KvCacheConfig(**CACHE))
    with GptManager(folder, FUSED, optional_params=own, **host.keywords()) as manager:
        host.manager = manager
        assert run() == greedy
        assert run() == greedy  # most of it found
        manager.sleep()
        manager.wake()
        assert run() == greedy
        manager.update_weights(other)
        assert run() == expected
        # a request that is computed again under the new weights begins with a state of zero
        manager.pause_generation()
        host.submit(InferenceRequest.from_tokens(next(numbers), PROMPTS[0], LENGTH))
        manager.update_weights(state, recompute=True)
        manager.resume_generation()
        last = host.final(next(numbers) - 1, 60)
        assert last.tensors["output_ids"].flatten().tolist() == greedy[0]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "granitemoehybrid dense"])
@pytest.mark.every(3)
def test_adapters_of_recurrent_layers(name: str, tmp_path: Path) -> None:
    config = {**family_config(name), "tie_word_embeddings": False}
    config, state = checkpoint(random_model(config))
    given = load_model((config, state))
    drawn = torch.Generator().manual_seed(1)
    matrices = [key for key in state if ".layers." in key and state[key].ndim == 2]
    names = {key: key.removesuffix(".weight") for key in matrices}
    pairs = {names[key]: random_pair(state[key], 4, drawn, False) for key in matrices}
    save_adapter(tmp_path, pairs, r=4, lora_alpha=8)
    merged = merge(state, pairs, dict.fromkeys(pairs, 2.0), False)
    weights, own = load_peft_adapter(tmp_path)
    adapted = {"lora_task_id": 1, "lora_weights": weights, "lora_config": own}
    found = tokens_of(given, requests_of(PROMPTS, **adapted))
    assert found == outputs((config, merged), PROMPTS) != outputs(given, PROMPTS)


@pytest.mark.parametrize(
    ("name", "width", "options"),
    [
        ("max_beam_width", 2, {}),
        (
            "host_cache_size",
            1,
            {"kv_cache_config": KvCacheConfig(**CACHE, host_cache_size=1 << 20)},
        ),
        ("speculative_decoding_config", 1, {"speculative_decoding_config": PromptLookup()}),
        ("parallel_config", 1, {"parallel_config": ParallelConfig()}),
    ],
    ids=str,
)
def test_what_a_state_rules_out_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, width: int, options: dict[str, Any]
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(Weights, "load", load)
    with pytest.raises(ConfigError, match=f"{name} = .* is refused: the model keeps a state"):
        GptManager(
            *(folder, FUSED, width),
            optional_params=options_of(**options),
            **RecordingCallbacks().keywords(),
        )


def test_a_card_says_that_a_model_keeps_a_state(folder: Path) -> None:
    assert ModelCard.of_folder(folder, ("recurrent",)).keeps_state
    assert not ModelCard.of_folder(Path("examples/tiny_llama"), ("llama",)).keeps_state
