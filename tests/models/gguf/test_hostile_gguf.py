"""GGUF files that lie or are broken: refused by ConfigError, soon, in little memory.

GPTMANAGER_FUZZ multiplies the number of random ones (default 1: 50 of them).
"""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bounded import bounded
from checkpoints import CONFIGS, random_model
from fuzz import FUZZ
from gguf_files import F32, gguf_bytes, model_metadata, model_tensors, text
from gguf_tokenizers import metadata_of

from gptmanager.callbacks import TokenDefaults, load_tokenizer
from gptmanager.errors import ConfigError
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import read_part

SPARE_BYTES, SECONDS = 1 << 30, 10
CONFIG = {**CONFIGS["llama"], "vocab_size": 905, "hidden_size": 16, "num_hidden_layers": 1}
NUMBERS = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]
TABLE = F32, np.zeros((4, 8), np.float32)


def parts(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {**CONFIG, "vocab_size": len(metadata_of(name)["tokenizer.ggml.tokens"])}
    model = random_model(config)
    metadata = {**model_metadata("llama", model.config.to_dict()), **metadata_of(name)}
    return metadata, model_tensors("llama", config, model.state_dict())


def read_all(path: Path) -> None:
    """All that a host asks of a checkpoint."""
    with bounded(SPARE_BYTES, SECONDS):
        load_model(path)
        TokenDefaults.of_folder(path)
        load_tokenizer(path).encode("Hello, world").ids
        read_part(path, "tokenizer_config.json")


@pytest.fixture(scope="module", params=["llama-bpe", "sentencepiece"])
def sound(request: pytest.FixtureRequest) -> bytes:
    return gguf_bytes(*parts(request.param))


def test_a_sound_file_is_read(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(sound)
    read_all(path)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """One to three faults, most of them in the header."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        end = draw.choice([64, 4000, len(data), len(data)])
        at = draw.randrange(0, max(1, min(end, len(data)) - 8))
        match draw.randrange(6):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at : at + 8] = struct.pack("<Q", draw.choice(NUMBERS))
            case 2:
                data[at : at + 4] = struct.pack("<I", draw.choice(NUMBERS) % 2**32)
            case 3:
                del data[at : at + draw.randint(1, 64)]
            case 4:
                data[at:at] = draw.randbytes(draw.randint(1, 64))
            case 5:
                del data[draw.randrange(len(data)) :]
    return bytes(data)


def test_mutated_files_raise_only_config_errors(sound: bytes, tmp_path: Path) -> None:
    draw, refused = random.Random(0), 0
    path = tmp_path / "a.gguf"
    for _ in range(25 * FUZZ):
        path.write_bytes(mutated(sound, draw))
        try:
            read_all(path)
        except ConfigError as error:
            assert len(str(error)) < 2000
            refused += 1
    assert refused > 5


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "name",
    ["qwen3moe", "llama_with_experts", "gpt-oss", "gemma4_small", "deepseek2_v3", "qwen35moe"],
)
def test_mutated_files_with_experts_raise_only_config_errors(name: str, tmp_path: Path) -> None:
    content = Path(__file__).with_name("architectures").joinpath(f"{name}.gguf").read_bytes()
    draw, refused, path = random.Random(0), 0, tmp_path / "a.gguf"
    for _ in range(15 * FUZZ):
        path.write_bytes(mutated(content, draw))
        try:
            with bounded(SPARE_BYTES, SECONDS):
                load_model(path)
        except ConfigError as error:
            assert len(str(error)) < 2000
            refused += 1
    assert refused > 3


def test_numbers_in_the_header_raise_only_config_errors(sound: bytes, tmp_path: Path) -> None:
    """Each length and count near the beginning, and sizes of tensors, one at a time."""
    draw, path, read = random.Random(1), tmp_path / "a.gguf", 0
    first_tensor = sound.index(b"token_embd.weight")
    places = [8, 16, 24, *range(first_tensor - 8, first_tensor + 60, 4)]
    for at in places:
        for number in draw.sample(NUMBERS, 2 * min(FUZZ, 5)):
            changed = sound[:at] + struct.pack("<Q", number) + sound[at + 8 :]
            path.write_bytes(changed)
            try:
                read_all(path)
                read += 1  # the number is the one that was there, or is of nothing
            except ConfigError:
                pass
    assert read < len(places) // 2


def changed_metadata(**changes: Any) -> bytes:
    metadata, tensors = parts("llama-bpe")
    own = {key.replace("__", "."): value for key, value in changes.items()}
    return gguf_bytes({**metadata, **own}, tensors)


def raw(tensors: bytes, count: int, rest: int = 64) -> bytes:
    """A file with tensors described by hand, and `rest` bytes of data."""
    header = b"GGUF" + struct.pack("<IQQ", 3, count, 0) + tensors
    return header + bytes(-len(header) % 32 + rest)


def described(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(shape))
        + struct.pack(f"<{len(shape)}Q", *shape)
        + struct.pack("<IQ", kind, offset)
    )


A, B = described("a", (8, 4), F32, 0), described("b", (8, 4), F32, 64)
WRONG: dict[str, tuple[bytes, str]] = {
    "not a GGUF": (b"PK\x03\x04" + bytes(100), "it is not a GGUF file"),
    "version 1": (gguf_bytes({}, {}, version=1), "version 1 of GGUF: versions 2 and 3"),
    "big endian": (gguf_bytes({}, {}, version=3 << 24), "is big-endian: gguf-convert-endian"),
    "many tensors": (raw(b"", 2**40), "tensors: at most 200000"),
    "many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "keys: at most 10000"),
    "no end": (b"GGUF" + struct.pack("<IQQ", 3, 0, 9), "cut off or damaged"),
    "a long key": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(99),
        "a key does not end within the file",
    ),
    "many strings": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**33),
        "strings for 'k': at most 2000000",
    ),
    "many numbers": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 2**61),
        "the array 'k' does not end",
    ),
    "arrays of arrays": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1),
        "an array of type 9 for 'k': not supported",
    ),
    "an unknown kind of value": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 77),
        "unknown type 77 for 'k'",
    ),
    "not UTF-8": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xfe" + bytes(99),
        "is not a readable GGUF file: .*utf-8",
    ),
    "alignment": (
        gguf_bytes({"general.alignment": 3}, {}),
        "alignment = 3: must be a power of two",
    ),
    "one file of several": (
        gguf_bytes({"split.count": 4}, {}),
        "is one of 4 files of a model: pass the first one, .* ends with -00001-of-00004.gguf",
    ),
    "far too many files": (
        gguf_bytes({"split.count": 2**31}, {}),
        "split.count = 2147483648: must be at most 1000",
    ),
    "a tensor twice": (raw(A + A, 2, 999), "two tensors of the same name"),
    "tensors in one place": (raw(A + B, 2, 999), "the tensor b that overlaps another tensor"),
    "behind the end": (
        raw(described("a", (8, 4), F32, 2**50), 1),
        "the tensor a does not end within the file",
    ),
    "unaligned": (raw(described("a", (8, 4), F32, 1), 1), "the tensor a at an unaligned"),
    "no dimensions": (raw(described("a", (), F32, 0), 1), "of 0 dimensions: must be 1 to 4"),
    "no elements": (raw(described("a", (0, 4), F32, 0), 1), r"of shape \[4, 0\]: sizes must be"),
    "large sizes": (
        raw(described("a", (2**31 - 1,) * 4, F32, 0), 1),
        "the tensor a does not end within the file",
    ),
    "half a block": (raw(described("a", (33, 4), 2, 0), 1), "Q4_0 needs a multiple of 32"),
    "a type of few bits": (
        raw(described("a", (256, 4), 9, 0), 1),
        "the tensor a of type Q8_1, which is not supported; supported: F32, F16, Q4_0",
    ),
    "a type of the future": (raw(described("a", (256, 4), 999, 0), 1), "of type 999"),
    "no architecture": (gguf_bytes({}, {"token_embd.weight": TABLE}), "architecture = None"),
    "numbers of experts": (
        changed_metadata(llama__expert_count=np.arange(99, dtype=np.int32)),
        "llama.expert_count = array.*: must be one number for all layers",
    ),
    "another architecture": (
        gguf_bytes({"general.architecture": "mamba"}, {"token_embd.weight": TABLE}),
        "general.architecture = 'mamba' is not supported; supported: llama, qwen2",
    ),
    "no embedding": (
        gguf_bytes({"general.architecture": "llama"}, {"output.weight": TABLE}),
        "has no tensor token_embd.weight",
    ),
    "an unknown key": (
        changed_metadata(llama__attention__clamp_kqv=8.0),
        "llama.attention.clamp_kqv = 8.0: not supported: it may change",
    ),
    "experts that there are not": (
        changed_metadata(llama__expert_count=8),
        "tensor blk.0.ffn_gate.weight of shape .* is unknown in the architecture mixtral",
    ),
    "heads of each layer": (
        changed_metadata(**{"llama.attention.head_count": np.array([4, 2], np.int32)}),
        "llama.attention.head_count = .*: must be one number for all layers",
    ),
    "experts of each layer": (
        changed_metadata(llama__expert_count=np.array([0, 8], np.int32)),
        "llama.expert_count = .*: must be one number for all layers",
    ),
    "a causal mask of each layer": (
        changed_metadata(**{"llama.attention.causal": np.array([1, 1], np.int32)}),
        "llama.attention.causal = .*: not supported",
    ),
    "unequal lengths": (
        changed_metadata(**{"llama.attention.value_length": 5}),
        "value_length = 5: must equal attention.key_length",
    ),
    "lengths of each layer": (
        changed_metadata(
            **{"llama.attention.key_length": np.array([1, 2], np.int32)},
            llama__attention__value_length=np.array([1, 3], np.int32),
        ),
        "value_length = .*: must equal attention.key_length",
    ),
    "layers": (changed_metadata(llama__block_count=9999), "num_hidden_layers = 9999"),
    "no heads": (
        changed_metadata(**{"llama.attention.head_count": 0}),
        "num_attention_heads = 0",
    ),
    "a rope of each layer": (
        changed_metadata(**{"llama.rope.scaling.type": np.array([1, 2], np.int32)}),
        r"rope.scaling.type = array.*: must be none, linear, yarn or longrope",
    ),
    "an unknown rope": (
        changed_metadata(**{"llama.rope.scaling.type": "spiral"}),
        "rope.scaling.type = 'spiral': must be",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_sentence_that_names_it(name: str, tmp_path: Path) -> None:
    content, told = WRONG[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as raised:
        read_all(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 2000


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    metadata, tensors = parts("llama-bpe")
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(metadata, {**tensors, "blk.0.ssm_in.weight": TABLE}))
    with pytest.raises(ConfigError, match="tensor blk.0.ssm_in.weight of shape"):
        read_all(path)


@pytest.mark.parametrize("number", ["1" * 9999, "\u0663"])
def test_the_number_of_a_layer_is_quoted(number: str, tmp_path: Path) -> None:
    metadata, tensors = parts("llama-bpe")
    path, name = tmp_path / "a.gguf", f"blk.{number}.attn_q.weight"
    path.write_bytes(gguf_bytes(metadata, {**tensors, name: (F32, np.zeros((6, 16), np.float32))}))
    with pytest.raises(ConfigError, match="has 6 rows, which must be a multiple of 2 x") as raised:
        read_all(path)
    assert len(str(raised.value)) < 2000


def test_a_folder_with_several_files_asks_for_one(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="holds 2 GGUF files: pass one of them .a.gguf, b.gguf."):
        read_all(tmp_path)


def test_a_long_token_cannot_cost_much_time(tmp_path: Path) -> None:
    metadata, tensors = parts("sentencepiece")
    metadata["tokenizer.ggml.tokens"][300] = "a" * 30_000
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors))
    with pytest.raises(ConfigError, match="the tokens are too long to find their merges"):
        read_all(path)
