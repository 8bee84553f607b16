"""Checkpoints that lie, hang or overflow: refused by ConfigError, soon, in little memory.

GPTMANAGER_FUZZ multiplies the number of random ones (default 1: 60 of them).
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import socket
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bounded import bounded
from checkpoints import CONFIGS, checkpoint, random_model
from fuzz import FUZZ
from safetensors.torch import save_file
from text_checkpoint import save_text_checkpoint

from gptmanager import GptManager, KvCacheConfig, ModelType, OptionalParams, SchedulerConfig
from gptmanager.callbacks import RequestQueue, TokenDefaults, generate, load_tokenizer
from gptmanager.errors import ConfigError, quoted
from gptmanager.kernels import CpuKernels
from gptmanager.memory import weights
from gptmanager.models import load_model

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_checkpoint(tmp_path_factory.mktemp("sound") / "text")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "hostile"))


def start(source: Any, **options: Any) -> None:
    """Start a manager as a host does, with the folder's token defaults."""
    options.setdefault("kv_cache_config", KvCacheConfig(max_tokens=256))
    with bounded():
        queue = RequestQueue()
        if isinstance(source, Path):
            queue = RequestQueue.for_checkpoint(source)
            load_tokenizer(source)
        manager = GptManager(
            source,
            ModelType.INFLIGHT_FUSED_BATCHING,
            1,
            SchedulerConfig(),
            queue.get_inference_requests,
            queue.send_response,
            queue.poll_stop_signal,
            None,
            OptionalParams(**options),
        )
        manager.shutdown(drain=False)


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        start(source, **options)
    text = str(refused.value)
    assert len(text) < 2500 and "\n" not in text
    return text


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# What a config may say ---------------------------------------------------------------------------

WRONG = "must be a positive integer"
LARGE = "at most 2147483647"
CONFIG_CASES: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000: must be a positive integer of"),
    ({"num_hidden_layers": 10**12}, "must be a positive integer of at most 10000"),
    ({"num_hidden_layers": 9999}, "num_hidden_layers = 9999: the checkpoint has only 30 tensors"),
    ({"num_hidden_layers": 0}, f"num_hidden_layers = 0: {WRONG}"),
    ({"num_hidden_layers": 3.0}, f"num_hidden_layers = 3.0: {WRONG}"),
    ({"max_position_embeddings": 2**31}, f"max_position_embeddings = 2147483648: .*{LARGE}"),
    ({"max_position_embeddings": 2**40}, LARGE),
    ({"max_position_embeddings": 10**4000}, LARGE),
    ({"max_position_embeddings": True}, f"max_position_embeddings = True: {WRONG}"),
    ({"max_position_embeddings": float("inf")}, f"max_position_embeddings = inf: {WRONG}"),
    ({"vocab_size": 2**40}, f"vocab_size = 1099511627776: .*{LARGE}"),
    ({"vocab_size": 2**30}, r" has shape \[257, 32\]; the config requires"),
    ({"vocab_size": "257"}, f"vocab_size = '257': {WRONG}"),
    ({"hidden_size": 64}, "has shape .* the config requires"),
    ({"hidden_size": 2**62}, LARGE),
    ({"intermediate_size": -1}, f"intermediate_size = -1: {WRONG}"),
    ({"num_attention_heads": 0}, f"num_attention_heads = 0: {WRONG}"),
    ({"num_attention_heads": -4}, f"num_attention_heads = -4: {WRONG}"),
    (
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None},
        "num_attention_heads = 3: must divide hidden_size = 32",
    ),
    ({"num_attention_heads": 10**6}, "num_attention_heads = 1000000: .* of at most 100000"),
    (
        {"num_attention_heads": 10**5, "num_key_value_heads": 10**5, "head_dim": 2},
        r"config.json: \d+ query heads in all layers: at most 100000 are supported",
    ),
    ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide num_attention_heads = 4"),
    ({"num_key_value_heads": [2]}, rf"num_key_value_heads = \[2\]: {WRONG}"),
    ({"head_dim": 10**400}, "head_dim = 10+.*: must be a positive integer of at most"),
    ({"head_dim": 2**31 - 2}, "has shape .* the config requires"),
    ({"head_dim": 7}, "head_dim = 7: 7 must be even"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: must be a positive number"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps = 10+.*: must be a positive number"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6': must be a positive number"),
    ({"hidden_act": ["silu"]}, "hidden_act = .*: must be one of"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: must be true or false"),
    ({"model_type": {"a": 1}}, "model_type = {'a': 1}: must be one of"),
    ({"model_type": "x" * 10**6}, r"model_type = 'x+\.\.\. \(1000002 characters\): must be"),
    ({"dtype": False}, "dtype = False: must be one of"),
    ({"dtype": 7}, "dtype = 7: must be one of"),
    ({"sliding_window": "all"}, "sliding_window = 'all': not supported in this family"),
    ({"layer_types": "full_attention"}, "layer_types = 'full_attention': not supported"),
    ({"layer_types": ["full_attention"] * 10**5}, "layer_types = .* characters.*not supported"),
    ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method = None: must be"),
    ({"rope_theta": 10**400, "rope_parameters": None}, "rope_theta = 10+.*: must be a positive"),
    ({"rope_scaling": "linear"}, "rope_scaling = 'linear': must be an object"),
    ({"rope_scaling": False}, "rope_scaling = False: must be an object"),
    ({"rope_parameters": [1]}, r"rope_parameters = \[1\]: must be an object"),
    ({"rope_parameters": {"rope_type": []}}, r"rope_type = \[\]: must be one of"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
        "factor = '2': must be a positive number",
    ),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 1e-300}},
        "rope_parameters.factor = 1e-300: must be a positive number from",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e308}},
        "rope_parameters.beta_fast = 1e.308: must be a positive number from",
    ),
    (
        {
            "rope_parameters": {
                "rope_type": "longrope", "short_factor": [1e400] * 4, "long_factor": [1] * 4,
            }
        },
        r"short_factor = \[inf, inf, inf, inf\]: must be positive numbers",
    ),
    (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1] * 10**5}},
        "short_factor = .* characters.*: must be a list of 4 numbers",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "text"), CONFIG_CASES)
@pytest.mark.parametrize("form", ["folder", "pair"])
def test_a_config_that_cannot_be(
    folder: Path, fields: dict[str, Any], text: str, form: str
) -> None:
    if form == "folder":
        change(folder, **fields)
        found = refusal(folder)
    else:
        config, state = checkpoint(random_model({**CONFIGS["llama"], "vocab_size": 257}))
        found = refusal(({**config, **fields}, state))
    assert_matches(found, text)


def assert_matches(found: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        raise ConfigError(found)


def test_positions_cost_no_more_than_the_cache_has_room_for(folder: Path) -> None:
    change(folder, max_position_embeddings=10**8)
    start(folder)  # its table would have 3.2 GB
    refused = refusal(folder, kv_cache_config=KvCacheConfig(max_tokens=2**31 - 1))
    assert "max_seq_len = " in refused


@pytest.mark.parametrize(
    ("options", "kv_cache", "beams", "text"),
    [
        ({}, {}, 2**40, "max_beam_width = 1099511627776 x max_batch_size = 256 must be at most"),
        ({}, {}, 10**4000, "max_beam_width = 10+... .* x max_batch_size = 256 must be at most"),
        (
            {"max_batch_size": 2**31 - 1},
            {},
            1,
            "no memory for steps of max_batch_size = 2147483647",
        ),
        (
            {"max_batch_size": 1, "max_num_tokens": 2**31 - 1},
            {},
            2**31 - 1,
            "no memory for steps of max_batch_size = 1 ",
        ),
        ({}, {"tokens_per_block": 2**31 - 1}, 1, "no KV cache block of .* bytes fits into"),
        ({}, {"host_cache_size": 2**63 - 1}, 1, "no memory for steps .* blocks and [0-9]+ on the"),
        ({}, {"host_cache_size": 2**50}, 1, "no memory for steps of max_batch_size = 256"),
    ],
)
def test_options_that_no_memory_holds(
    sound: Path, options: dict[str, Any], kv_cache: dict[str, Any], beams: int, text: str
) -> None:
    if "host_cache_size" in kv_cache:
        kv_cache = {**kv_cache, "enable_block_reuse": True, "host_swap": "always"}
    params = OptionalParams(KvCacheConfig(max_tokens=256, **kv_cache), **options)
    scheme = ModelType.INFLIGHT_FUSED_BATCHING
    with bounded(), pytest.raises(ConfigError, match=text):
        GptManager(
            sound, scheme, beams, None, lambda count: [], lambda *sent: None, None, None, params
        )


def test_no_memory_for_positions(folder: Path) -> None:
    change(folder, max_position_embeddings=2**31 - 1)
    model = load_model(folder, kernels=CpuKernels())
    with bounded(), pytest.raises(ConfigError, match="no memory for max_seq_len = 2147483647"):
        model.reserve_positions(2**31 - 1)


def test_a_state_dict_that_has_no_values(sound: Path) -> None:
    config, state = checkpoint(random_model({**CONFIGS["llama"], "vocab_size": 257}))
    for bad, text in (
        (state[EMBEDDING].to("meta"), "must be a dense tensor with values, got layout"),
        (state[EMBEDDING].to_sparse(), "embed_tokens.weight: must be a dense tensor with values"),
        (state[EMBEDDING].int(), "has dtype int32"),
        (state[EMBEDDING].to(torch.complex64), "has dtype complex64"),
        ([1.0], "must be a torch.Tensor, got list"),
        (None, "must be a torch.Tensor, got NoneType"),
    ):
        assert_matches(refusal((config, {**state, EMBEDDING: bad})), text)
    assert "the name must be a str" in refusal((config, {**state, 5: state[EMBEDDING]}))
    vast = torch.zeros(1, 1).expand(2**31 - 1, 32)
    assert_matches(
        refusal(
            (
                {**config, "vocab_size": 2**31 - 1},
                {**state, EMBEDDING: vast, "lm_head.weight": vast},
            )
        ),
        r"no memory for weights of 549\d+ bytes in torch.float32: .*bytes are free",
    )
    assert "nested deeper than 64" in refusal(({**config, "x": deep(2000)}, state))


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


# What files may be -------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def endless(path: Path) -> None:
    path.symlink_to("/proc/kmsg")  # a file that says it is empty, and waits


def a_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def vast(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS: list[tuple[Callable[[Path], None], str]] = [
    (fifo, "is a FIFO, a socket or a device: it must be a file"),
    (device, "is a FIFO, a socket or a device: it must be a file"),
    (endless, "is empty"),
    (a_socket, "is a FIFO, a socket or a device: it must be a file"),
    (a_loop, "cannot be read: Too many levels of symbolic links"),
    (Path.mkdir, "is a folder: it must be a file"),
    (lambda path: path.write_bytes(b""), "is empty"),
    (lambda path: path.symlink_to("/nowhere"), "does not exist"),
]
FILES = ["config.json", "generation_config.json", "tokenizer.json", SINGLE, INDEX]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("make", "text"), KINDS)
def test_a_path_that_is_not_a_file_is_refused_before_it_is_opened(
    folder: Path, make: Callable[[Path], None], text: str, name: str
) -> None:
    (folder / SINGLE if name == INDEX else folder / name).unlink(missing_ok=True)
    make(folder / name)
    found = refusal(folder)
    assert f"{name} {text}" in found


CONTENTS: list[tuple[bytes | Callable[[Path], None], str]] = [
    (b"[" * 200_000 + b"]" * 200_000, "nested deeper than 64 levels"),
    (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "nested deeper than 64 levels"),
    (b'{"a":' * 100 + b"1" + b"}" * 100, "nested deeper than 64 levels"),
    (
        b'{"eos_token_id": 1, "eos_token_id": 2}',
        "'eos_token_id' occurs twice, with different values",
    ),
    (b"\xef\xbb\xbf[]", "must be a JSON object"),  # a byte order mark is no harm
    (b"\xff\xfe\x00", "is not JSON"),
    (b'{"a": "\xff"}', "is not JSON"),
    (b"null", "must be a JSON object"),
    (b"{", "is not JSON"),
    (b"1" * 10_000, "is not JSON: Exceeds the limit"),
    (vast, "has 1099511627776 bytes: the limit is 67108864"),
]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize(("content", "text"), CONTENTS)
def test_json_that_cannot_be(
    folder: Path, content: bytes | Callable[[Path], None], text: str, name: str
) -> None:
    if name == INDEX:
        (folder / SINGLE).unlink()
    write(folder / name, content)
    assert_matches(refusal(folder), rf"{name}.* {text}")


def write(path: Path, content: bytes | Callable[[Path], None]) -> None:
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)


def test_a_value_given_twice_is_harmless(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"vocab_size": 257,', 1))
    start(folder)


@pytest.mark.parametrize(
    "content",
    [b"[" * 200_000, b'{"version": "1"}', b'{"model": {"type": "BPE"}}', b"\x00", vast],
)
def test_a_tokenizer_that_is_none(folder: Path, content: Any) -> None:
    write(folder / "tokenizer.json", content)
    assert "tokenizer.json" in refusal(folder)


def test_a_tokenizer_neither_pads_nor_cuts(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.enable_padding(length=10**6)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("abcdef").ids) == 6


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"eos_token_id": "end"}, "eos_token_id = 'end' must be a token id"),
        ({"eos_token_id": [1, "2"]}, r"eos_token_id = \[1, '2'\] must be a token id"),
        ({"eos_token_id": [[1]]}, r"eos_token_id = \[\[1\]\] must be a token id"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id = {'a': 1} must be a token id"),
        ({"eos_token_id": True}, "eos_token_id = True must be a token id"),
        ({"eos_token_id": 1.5}, "eos_token_id = 1.5 must be a token id"),
        ({"eos_token_id": 2**31}, "eos_token_id = 2147483648 must be a token id"),
        ({"eos_token_id": list(range(2000))}, r"eos_token_id = \[0, 1.* or a list of at most 1024"),
        ({"pad_token_id": "pad"}, "pad_token_id = 'pad' must be a token id"),
        ({"pad_token_id": [0]}, r"pad_token_id = \[0\] must be a token id"),
        ({"pad_token_id": -(2**40)}, "pad_token_id = -1099511627776 must be a token id"),
    ],
)
def test_tokens_that_are_none(folder: Path, fields: dict[str, Any], text: str) -> None:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    assert_matches(refusal(folder), f"generation_config.json: {text}")
    with pytest.raises(ConfigError, match=f"config.json: {text}"):
        TokenDefaults.of_config(fields)


def test_an_error_of_a_missing_checkpoint_folder_says_so(tmp_path: Path) -> None:
    for missing in (tmp_path / "nowhere", "a\0b"):
        with pytest.raises(ConfigError, match="is not a folder: pass one with a tokenizer"):
            generate(missing, "Once")
        with pytest.raises(ConfigError, match="is not a folder: pass a checkpoint folder"):
            generate(missing, [1, 2])


# What safetensors may hold -----------------------------------------------------------------------


def header(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(file: Path, tensors: dict[str, Any], data: bytes) -> None:
    text = json.dumps(tensors).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def lies(folder: Path, **fields: Any) -> None:
    tensors, data = header(folder / SINGLE)
    tensors[EMBEDDING] |= fields
    with_header(folder / SINGLE, tensors, data)


def overlap(folder: Path) -> dict[str, Any]:
    return {"data_offsets": header(folder / SINGLE)[0]["lm_head.weight"]["data_offsets"]}


HEADERS: list[tuple[Callable[[Path], None], str]] = [
    (lambda f: (f / SINGLE).write_bytes(struct.pack("<Q", 2**63)), "cannot be read as safetensors"),
    (lambda f: (f / SINGLE).write_bytes(struct.pack("<Q", 2**26) + b"{"), "as safetensors"),
    (lambda f: (f / SINGLE).write_bytes(b"\x00" * 100), "cannot be read as safetensors"),
    (lambda f: (f / SINGLE).write_bytes(struct.pack("<Q", 2) + b"{}"), "the checkpoint has only 0"),
    (lambda f: lies(f, shape=[2**62, 2**62]), "cannot be read as safetensors"),
    (lambda f: lies(f, shape=[2**32, 2**32]), "cannot be read as safetensors"),
    (lambda f: lies(f, shape=[-1, 32]), "cannot be read as safetensors"),
    (lambda f: lies(f, shape=[0, 0]), "cannot be read as safetensors"),
    (lambda f: lies(f, data_offsets=[0, 2**62]), "cannot be read as safetensors"),
    (
        lambda f: lies(f, **overlap(f)),
        "cannot be read as safetensors",
    ),
    (lambda f: lies(f, dtype="I32"), "has dtype int32; must be one of"),
    (lambda f: lies(f, dtype="X"), "cannot be read as safetensors"),
    (lambda f: vast(f / SINGLE), "cannot be read as safetensors"),
]


@pytest.mark.parametrize(("mangle", "text"), HEADERS)
def test_headers_with_wrong_values(folder: Path, mangle: Callable[[Path], None], text: str) -> None:
    mangle(folder)
    assert text in refusal(folder)


def test_weights_that_do_not_fit_into_memory(folder: Path) -> None:
    """A file that is as long as it says costs no disk space, and would cost half a terabyte."""
    tensors, _ = header(folder / SINGLE)
    tensors.pop("__metadata__", None)
    rows, end = 2**31 - 1, 0
    for name, tensor in tensors.items():
        if name in (EMBEDDING, "lm_head.weight"):
            tensor["shape"][0] = rows
        size = 4 * math.prod(tensor["shape"])
        tensor["data_offsets"] = [end, end + size]
        end += size
    with_header(folder / SINGLE, tensors, b"")
    os.truncate(folder / SINGLE, os.path.getsize(folder / SINGLE) + end)
    change(folder, vocab_size=rows)
    told = r"no memory for weights of 549\d+ bytes in torch.float32|unable to mmap 549\d+ bytes"
    with pytest.raises(ConfigError, match=told):
        load_model(folder, kernels=CpuKernels())


def test_free_memory_is_asked_before_weights_are_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "free_memory_bytes", lambda: 1000)
    found = refusal(folder)
    assert re.fullmatch(
        r"no memory for weights of \d+ bytes in torch.float32: 1000 bytes are free", found
    )


def empty_tensors(folder: Path, count: int) -> None:
    one = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    with_header(folder / SINGLE, {f"model.layers.{i}.a": one for i in range(count)}, b"")


def test_many_tensors_are_soon_refused(folder: Path) -> None:
    empty_tensors(folder, 10_000)
    change(folder, num_hidden_layers=1000)
    assert "tensors are unknown: model.layers.0.a, model.layers.1.a" in refusal(folder)
    empty_tensors(folder, 200_001)
    assert "holds 200001 tensors: a checkpoint may have at most 200000 in all" in refusal(folder)


# At random ---------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 31, 10**8, 2**31 - 1, 2**31, 2**63, 2**64, 10**400,
    0.0, 0.5, -1.5, 1e308, 1e-308, float("nan"), float("inf"), "", "a", "\ud800", "x" * 5000,
    [], [1], ["full_attention"], [None] * 9, {}, {"a": 1}, {"rope_type": "yarn", "factor": 4},
    {"rope_type": "llama3"}, {"type": "linear", "factor": -1},
]  # fmt: skip


def mangle_config(folder: Path, chance: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    names = [*config, "rope_scaling", "sliding_window", "layer_types", "head_dim", "torch_dtype"]
    change(
        folder,
        **{chance.choice(names): chance.choice(VALUES) for _ in range(chance.choice((1, 1, 3)))},
    )


def mangle_tokens(folder: Path, chance: random.Random) -> None:
    names = ("eos_token_id", "pad_token_id", "x")
    content = {name: chance.choice(VALUES) for name in names if chance.random() < 0.7}
    (folder / "generation_config.json").write_text(json.dumps(content))


def mangle_header(folder: Path, chance: random.Random) -> None:
    tensors, data = header(folder / SINGLE)
    for _ in range(chance.choice((1, 1, 4))):
        name = chance.choice(list(tensors))
        what = chance.choice(("drop", "rename", "shape", "dtype", "data_offsets", "swap"))
        if what == "drop":
            tensors.pop(name)
        elif what == "rename":
            tensors[chance.choice(("", "model.layers.99999999999999.q", "\ud800", "x"))] = (
                tensors.pop(name)
            )
        elif what == "swap":
            other = chance.choice(list(tensors))
            tensors[name], tensors[other] = tensors[other], tensors[name]
        elif name != "__metadata__":
            tensors[name][what] = chance.choice([*VALUES, [0, 4], [2**31, 2**31], "BF16", "F64"])
        if not tensors:
            break
    with_header(folder / SINGLE, tensors, data)


def mangle_bytes(folder: Path, chance: random.Random) -> None:
    file = folder / chance.choice(
        ["config.json", "generation_config.json", "tokenizer.json", SINGLE]
    )
    content = bytearray(file.read_bytes())
    for _ in range(chance.choice((1, 3, 20))):
        where = chance.randrange(min(len(content), 4000))
        if chance.random() < 0.3:
            del content[where : where + chance.choice((1, 7, 10**6))]
        else:
            content[where : where + 1] = bytes(
                chance.randrange(256) for _ in range(chance.choice((1, 4)))
            )
        content = content or bytearray(b"x")
    file.write_bytes(content)


def mangle_file(folder: Path, chance: random.Random) -> None:
    name = chance.choice(FILES)
    (folder / name).unlink(missing_ok=True)
    if name == INDEX:
        (folder / SINGLE).unlink()
    chance.choice(KINDS)[0](folder / name)


def mangle_index(folder: Path, chance: random.Random) -> None:
    tensors, _ = header(folder / SINGLE)
    names = [
        SINGLE,
        "a.safetensors",
        "../hostile/a.safetensors",
        "/dev/zero",
        "",
        ".",
        "..",
        3,
        None,
        "\ud800",
    ]
    (folder / SINGLE).rename(folder / "a.safetensors")
    index = {n: "a.safetensors" for n in tensors if n != "__metadata__"}
    for _ in range(chance.choice((0, 1, 2))):
        index[chance.choice([*index, "x"])] = chance.choice(names)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


MANGLERS = [mangle_config, mangle_tokens, mangle_header, mangle_bytes, mangle_file, mangle_index]


@pytest.mark.parametrize("seed", range(60 * FUZZ))
def test_a_random_checkpoint_starts_or_is_refused_by_name(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    chosen = chance.sample(MANGLERS, chance.choice((1, 1, 2)))
    for mangle in sorted(chosen, key=lambda mangle: mangle is mangle_file):  # no other may read it
        try:
            mangle(folder, chance)
        except (OSError, KeyError, ValueError, struct.error):
            pass  # the first one left nothing to mangle
    try:
        start(folder)
    except ConfigError as error:
        assert len(str(error)) < 2500


def test_it_is_the_sound_one_that_is_mangled(folder: Path) -> None:
    start(folder)
    model = load_model(folder, kernels=CpuKernels())
    assert model.spec.max_seq_len == 160
    save_file({"a": torch.ones(1)}, folder / "b.safetensors")  # what no index names is not read
    start(folder)


@pytest.mark.parametrize(
    "value, told",
    [
        ("x" * 10**6, r"'x{199}\.\.\. \(1000002 characters\)"),
        ([0] * 10**6, r"\[0, 0, .*\.\.\.\] \(more than 100000 characters\)"),
        ([["x" * 10**6] * 3], r"\[\['x.*\(more than 100000 characters\)"),
        (dict.fromkeys(range(10**6)), r"\{0: None, .*\(more than 100000 characters\)"),
        ([0] * 1000, r"\[0, 0, .*\.\.\. \(3000 characters\)"),
    ],
    ids=["text", "list", "texts", "object", "short list"],
)
def test_what_a_value_shows_in_an_error_is_cut_before_it_is_written(value, told):
    tracemalloc.start()
    found = quoted(value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert re.fullmatch(told, found) and len(found) < 300
    assert peak < 1 << 20
