"""Tiny random checkpoints made with transformers, their logits, and a driver of the paged cache."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gptmanager.bench.load import random_llama
from gptmanager.kernels.capture.captured_step import StepCapture
from gptmanager.kernels.lora.adapter_arguments import StepAdapters
from gptmanager.memory import KvPool
from gptmanager.models import Batch, Model
from gptmanager.models.model import page_shapes, state_shapes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:  # a machine for kernels may lack it: what needs it is skipped there
        transformers = None

if transformers is not None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    **_SPECIAL,
}
_GPT2_SIZES = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 160,
    **_SPECIAL,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}

CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES},
    "llama3": {"model_type": "llama", **_SIZES, "rope_parameters": LLAMA3_ROPE},
    "llama_biased": {
        "model_type": "llama",
        **_SIZES,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", **_SIZES, "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", **_SIZES},
    "qwen2_windows": {
        "model_type": "qwen2",
        **_SIZES,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", **_SIZES, "head_dim": 16},
    "gpt2": {"model_type": "gpt2", **_GPT2_SIZES},
    "gpt2_odd": {
        "model_type": "gpt2",
        **_GPT2_SIZES,
        "n_inner": 40,
        "activation_function": "gelu",
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
}

_PARTS = {"mistral4": "Mistral4ForCausalLM"}  # parts of multimodal models in transformers


def new_model(config: Mapping[str, Any]) -> Any:
    if transformers is None:
        pytest.skip("transformers is not installed")
    fields = copy.deepcopy(dict(config))  # transformers writes into them
    hf_config, make = AutoConfig.for_model(**fields), AutoModelForCausalLM.from_config
    if config["model_type"] in _PARTS:
        make = getattr(transformers, _PARTS[config["model_type"]])._from_config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the code of GPTBigCode uses functions that are deprecated
        return make(
            hf_config,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        ).eval()


def default_config(model_type: str) -> Any:
    """What transformers takes where a config.json says nothing."""
    return AutoConfig.for_model(model_type)


def random_model(config: Mapping[str, Any], seed: int = 0) -> Any:
    """A transformers model in float32; every parameter is random, norms and biases included."""
    model = new_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            is_norm = parameter.ndim == 1 and bool((parameter == 1).all())
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise / 5 if is_norm else noise / 5)
    return model


def random_state(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """The tensors of `random_model`; without transformers, others, and of a Llama only."""
    if transformers is not None or config["model_type"] != "llama":
        return random_model(config, seed).state_dict()
    drawn = random_llama(config, seed)  # norms 1, the rest normal(0, 0.02)
    return {name: it if it.ndim == 1 else 10 * it for name, it in drawn.items()}


def save_large(config: Mapping[str, Any], folder: Path) -> None:
    """A checkpoint folder of any size, fast: its tensors all begin with the same numbers."""
    with torch.device("meta"):
        model = new_model(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    numbers = torch.randn(max(shape.numel() for shape in shapes.values()))
    tensors = {name: numbers[: s.numel()].reshape(s).clone() for name, s in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(model.config.to_json_string())


def checkpoint(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config dict as `save_pretrained` writes it, state dict)."""
    return json.loads(model.config.to_json_string()), model.state_dict()


def expected_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' logits `[T, vocab]` of one sequence alone, float32."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()


class _Float64Stays(TorchFunctionMode):
    """transformers computes norms and the softmax in float32, whatever the dtype: not here."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float:
                return args[0]
            args = [torch.float64 if it is torch.float32 else it for it in args]
            kwargs |= {k: torch.float64 for k, it in kwargs.items() if it is torch.float32}
        return func(*args, **kwargs)


def in_float64(model: Any) -> Any:
    """A copy with parameters in float64; the angles of its rope stay float32 numbers."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model


def exact_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' logits `[T, vocab]` of one sequence alone, with nothing less than float64."""
    with torch.no_grad(), _Float64Stays():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert logits.dtype is torch.float64
    return logits


def expected_rope(config: Mapping[str, Any], positions: Tensor) -> Tensor:
    """transformers' cosines `[T, head_dim / 2]` of a Llama's angles, then their sines."""
    rotary = new_model(config).model.rotary_emb
    cos, sin = rotary(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


def is_greedy(model: Any, prompt: Sequence[int], generated: Sequence[int]) -> bool:
    """Whether transformers, always taking the likeliest token, generates the same.

    One pass decides: by induction each token must be the likeliest after those before it.
    """
    logits = expected_logits(model, [*prompt, *generated[:-1]])
    return logits[len(prompt) - 1 :].argmax(-1).tolist() == list(generated)


class PagedDriver:
    """Runs packed batches of a model over its own pool, whose pages lie in a shuffled order.

    Pages are filled with NaN at first: whoever reads what was never written shows it.
    """

    def __init__(
        self,
        model: Model,
        num_slots: int,
        tokens_per_block: int = 8,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        spec = model.spec
        num_blocks = -(-spec.max_seq_len // tokens_per_block)
        total = num_slots * num_blocks
        self.model = model
        states = {"state_shapes": state_shapes(spec), "num_lines": num_slots}
        self.pool = KvPool(page_shapes(spec), total, tokens_per_block, dtype=dtype, **states)
        for pages in chain.from_iterable(it.tokens for it in self.pool.stacks):
            pages.fill_(torch.nan)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
        self._block_tables = order.to(torch.int32).reshape(num_slots, num_blocks)
        self._token_table = torch.zeros(num_slots, spec.max_seq_len, dtype=torch.int32)
        self._lengths = [0] * num_slots
        self.adapters: StepAdapters | None = None  # `rows`: of each slot
        self.step_capture: StepCapture | None = None  # for steps of one sampled token each

    def forward(
        self, rows: Sequence[tuple[int, Sequence[int]]], sample: Sequence[int] | None = None
    ) -> Tensor:
        """Run (slot, next tokens) rows; the logits of the packed tokens `sample`, None: of all."""
        starts = [0]
        positions: list[int] = []
        for slot, tokens in rows:
            first = self._lengths[slot]
            self._lengths[slot] += len(tokens)
            self._token_table[slot, first : self._lengths[slot]] = torch.tensor(tokens)
            positions += range(first, self._lengths[slot])
            starts.append(starts[-1] + len(tokens))
        sample = range(starts[-1]) if sample is None else sample
        row_of = [row for row, (_, tokens) in enumerate(rows) for _ in tokens]
        batch = Batch(
            token_ids=torch.tensor([token for _, tokens in rows for token in tokens]),
            positions=torch.tensor(positions),
            row_starts=torch.tensor(starts, dtype=torch.int32),
            kv_lengths=torch.tensor([self._lengths[slot] for slot, _ in rows], dtype=torch.int32),
            slots=torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
            block_tables=self._block_tables,
            token_table=self._token_table,
            sample_index=torch.tensor(list(sample), dtype=torch.int64),
            sample_rows=torch.tensor([row_of[token] for token in sample], dtype=torch.int64),
            num_context_rows=sum(len(tokens) > 1 for _, tokens in rows),
            adapters=self._adapters_of([slot for slot, tokens in rows for _ in tokens]),
        )
        if self.step_capture is not None and list(sample) == list(range(len(rows))) == row_of:
            batch = replace(batch, all_sampled=True)
            return self.model.forward_captured(batch, self.pool, self.step_capture)
        return self.model.forward(batch, self.pool)

    def _adapters_of(self, slots: Sequence[int]) -> StepAdapters | None:
        if self.adapters is None:
            return None
        return replace(self.adapters, rows=self.adapters.rows[list(slots)])

    def greedy(
        self, prompts: Sequence[Sequence[int]], num_new: int, chunk: int | None = None
    ) -> list[list[int]]:
        """`num_new` tokens of each prompt; `chunk`: prompt tokens a step, None: all at once.

        A prompt that is through generates while longer ones are still in their chunks.
        """
        waiting = {slot: list(prompt) for slot, prompt in enumerate(prompts)}
        results: list[list[int]] = [[] for _ in prompts]
        while waiting:
            rows = [(slot, tokens[: chunk or len(tokens)]) for slot, tokens in waiting.items()]
            rows.sort(key=lambda row: len(row[1]) == 1)
            ends = torch.tensor([len(tokens) for _, tokens in rows]).cumsum(0) - 1
            sampling = [
                (slot, int(end))
                for (slot, tokens), end in zip(rows, ends, strict=True)
                if len(tokens) == len(waiting[slot])
            ]
            logits = self.forward(rows, [end for _, end in sampling])
            for slot, tokens in rows:
                waiting[slot] = waiting[slot][len(tokens) :]
            for (slot, _), token in zip(sampling, logits.argmax(-1).tolist(), strict=True):
                results[slot].append(token)
                waiting[slot] = [token]
                if len(results[slot]) == num_new:
                    del waiting[slot]
        return results
