"""How fast quantized folders load, and with how much memory: not a test, since it takes minutes.

python tests/benchmarks/measure_quantized_loading.py [FORMAT...]

Each folder has random weights in the shape of Qwen2 0.5B, with an embedding in bfloat16. LAYERS
sets the number of layers (24). FOLDERS names a folder in which they are kept for the next run; by
default they are temporary. `read`: copying all tensors of the folder to memory. Seconds are those
of the clock, and of the CPU in the program and in the system. Each of ROUNDS (3) lines is a process
of its own, so that no load uses memory of the one before. All files are in the page cache; with
COLD=1 they are dropped from it before each read and each load. Before the load, twice its memory
is used and freed: the host of a virtual machine may have to provide memory at its first use, which
can take longer than the load. HOST=1 leaves this out. `peak`: the largest resident memory while the
folder is loaded, without what was resident before, next to the bytes of the weights.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.memory.checkpoint.safetensors_reader import SafetensorsFolder
from gptmanager.models import load_model

HIDDEN, INNER, KV, VOCAB, GROUP = 896, 4864, 128, 151_936, 128
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.rand(shape) / 64 + 1e-3).to(dtype)


QUANTIZED = "quantization_config"


def ct(kind: str, bits: int, **more: Any) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, "strategy": "channel", **more}
    return {"quant_method": "compressed-tensors", "config_groups": {"all": {"weights": weights}}}


def int4(rows: int, columns: int) -> dict[str, Tensor]:
    return {
        "weight_packed": words(rows, columns // 8),
        "weight_scale": scales(rows, columns // GROUP, dtype=torch.float16),
        "weight_shape": torch.tensor([rows, columns]),
    }


def float8(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).to(torch.float8_e4m3fn)


def transposed(order: str, rows: int, columns: int) -> dict[str, Tensor]:
    packed = words(columns, rows // 8) if order == "awq" else words(columns // 8, rows)
    return {
        "qweight": packed,
        "qzeros": words(columns // GROUP, rows // 8),
        "scales": scales(columns // GROUP, rows, dtype=torch.float16),
    }


def reordered(rows: int, columns: int) -> dict[str, Tensor]:
    index = torch.randint(0, columns // GROUP, (columns,), dtype=torch.int32)
    return {**transposed("gptq", rows, columns), "g_idx": index}


def nvfp4(rows: int, columns: int) -> dict[str, Tensor]:
    return {
        "weight_packed": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        "weight_scale": torch.rand(rows, columns // 16).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([8.0]),
    }


def mxfp4(rows: int, columns: int) -> dict[str, Tensor]:
    return {
        "weight_packed": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        "weight_scale": torch.randint(118, 124, (rows, columns // 32), dtype=torch.uint8),
    }


def nf4(rows: int, columns: int) -> dict[str, Tensor]:
    state = json.dumps({"shape": [rows, columns], "blocksize": 64}).encode()
    return {
        "weight": torch.randint(0, 256, (rows * columns // 2, 1), dtype=torch.uint8),
        "weight.absmax": torch.rand(rows * columns // 64),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }


GROUPED = {"strategy": "group", "group_size": GROUP}
OF_GROUPS = {"bits": 4, "group_size": GROUP}
FORMATS: Mapping[str, tuple[dict[str, Any] | None, Callable[[int, int], dict[str, Tensor]]]] = {
    "bfloat16": (None, lambda n, m: {"weight": torch.randn(n, m).bfloat16()}),
    "bfloat16 as int8": (None, lambda n, m: {"weight": torch.randn(n, m).bfloat16()}),
    "bfloat16 as int4": (None, lambda n, m: {"weight": torch.randn(n, m).bfloat16()}),
    "ct-int4": (ct("int", 4, **GROUPED), int4),
    "ct-int8": (
        ct("int", 8),
        lambda n, m: {"weight": words(n, m // 4).view(torch.int8), "weight_scale": scales(n, 1)},
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda n, m: {
            "weight": float8(n, m),
            "weight_scale_inv": scales(-(-n // 128), -(-m // 128), dtype=torch.float32),
        },
    ),
    "nvfp4": (ct("float", 4, strategy="tensor_group", group_size=16), nvfp4),
    "mxfp4": (ct("float", 4, strategy="group", group_size=32), mxfp4),
    "gptq": ({"quant_method": "gptq", **OF_GROUPS}, lambda n, m: transposed("gptq", n, m)),
    "gptq act-order": ({"quant_method": "gptq", **OF_GROUPS}, reordered),
    "awq": ({"quant_method": "awq", **OF_GROUPS}, lambda n, m: transposed("awq", n, m)),
    "nf4": ({"quant_method": "bitsandbytes"}, nf4),
}


GPT_OSS = "gpt-oss"  # its layers have experts in MXFP4; other matrices are bfloat16
EXPERTS = 8
GPT_OSS_CONFIG = {
    **CONFIG,
    "model_type": "gpt_oss",
    "intermediate_size": HIDDEN,
    "head_dim": 64,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "rope_scaling": None,
    "sliding_window": 128,
    QUANTIZED: {"quant_method": "mxfp4"},
}


def make_gpt_oss(folder: Path, layers: int) -> None:
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN).bfloat16()}
    tensors["model.norm.weight"] = torch.ones(HIDDEN).bfloat16()
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for module, shape in [*LINEARS.items()][:4] + [("mlp.router", (EXPERTS, HIDDEN))]:
            tensors[f"{prefix}{module}.weight"] = torch.randn(shape).bfloat16()
            tensors[f"{prefix}{module}.bias"] = torch.zeros(shape[0]).bfloat16()
        tensors[f"{prefix}self_attn.sinks"] = torch.zeros(14).bfloat16()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
        for part, rows in (("gate_up_proj", 2 * HIDDEN), ("down_proj", HIDDEN)):
            own, shape = f"{prefix}mlp.experts.{part}", (EXPERTS, rows, HIDDEN // 32)
            tensors[f"{own}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{own}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8)
            tensors[f"{own}_bias"] = torch.zeros(shape[:2]).bfloat16()
    kinds = ["sliding_attention", "full_attention"] * layers
    save(folder, {**GPT_OSS_CONFIG, "layer_types": kinds[:layers]}, tensors, layers)


def make(name: str, folder: Path, layers: int) -> None:
    if name == GPT_OSS:
        make_gpt_oss(folder, layers)
        return
    scheme, pack = FORMATS[name]
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for module, shape in LINEARS.items():
            tensors |= {f"{prefix}{module}.{end}": it for end, it in pack(*shape).items()}
        for module in "qkv":
            size = HIDDEN if module == "q" else KV
            tensors[f"{prefix}self_attn.{module}_proj.bias"] = torch.zeros(size).bfloat16()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
    config: dict[str, Any] = {**CONFIG} if scheme is None else {**CONFIG, QUANTIZED: scheme}
    save(folder, config, tensors, layers)


def save(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], layers: int) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))


def drop_pages(folder: Path) -> None:
    """Drop the files of a folder from the page cache if the measurement is cold."""
    if os.environ.get("COLD"):
        for file in folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())  # pages that are not on the disk yet are not dropped
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(it.split()[1]) for it in status.splitlines() if it.startswith("VmHWM"))


def forget_peak() -> int:
    """Return the bytes that are resident, from which the peak counts on."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


class Seconds(NamedTuple):
    wall: float
    user: float
    system: float

    def __str__(self) -> str:
        return f"{self.wall:.2f} s (CPU {self.user:.2f} + {self.system:.2f})"


def seconds(action: Callable[[], Any]) -> tuple[Seconds, Any]:
    """Return the time that an action takes, and its result."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    result = action()
    stop, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    own = Seconds(stop - start, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime)
    return own, result


def use_memory(num_bytes: int) -> None:
    """Use and free memory, in huge pages as weights do."""
    if not os.environ.get("HOST"):
        with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            for start in range(0, num_bytes, mmap.PAGESIZE):
                memory[start] = 1


def read(folder: Path) -> None:
    source = SafetensorsFolder(folder)
    for name in source.describe():
        for _, piece in source.pieces(name, 1 << 24):
            piece.clone()


def measure(name: str, small: Path, folder: Path) -> None:
    """Print the figures of a format. The small folder warms everything up."""
    kinds: Mapping[str, Any] = {"bfloat16": None, "bfloat16 as int4": "int4"}
    kind = kinds.get(name, "file")
    load_model(small, weights_dtype=kind)
    read(small)
    nbytes = sum(it.stat().st_size for it in folder.iterdir())
    drop_pages(folder)
    of_read, _ = seconds(lambda: read(folder))
    use_memory(2 * nbytes)
    drop_pages(folder)
    resident = forget_peak()
    of_load, model = seconds(lambda: load_model(folder, weights_dtype=kind))
    ratio = (peak_bytes() - resident) / model.nbytes
    grouped = sum(isinstance(it, Int4Matrix) for it in model.weights.matrices)
    print(
        f"{name:16} {nbytes / 1e6:5.0f} MB, read {of_read}, load {of_load}, "
        f"{of_load.wall / of_read.wall:.1f} x; peak {ratio:.2f} x of {model.nbytes / 1e6:.0f} MB, "
        f"{grouped} of {len(model.weights.matrices)} matrices in 4 bits",
        flush=True,
    )


def main(names: list[str]) -> None:
    layers = int(os.environ.get("LAYERS", "24"))
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(os.environ.get("FOLDERS", temporary))
        for name in names or [*FORMATS, GPT_OSS]:
            small, folder = root / f"{name} small", root / name
            for own, count in ((small, 1), (folder, layers)):
                if not own.exists():
                    make(name, own, count)
            command = [sys.executable, __file__, "--measure", name, str(small), str(folder)]
            for _ in range(int(os.environ.get("ROUNDS", "3"))):
                subprocess.run(command, check=True)
            if "FOLDERS" not in os.environ:
                shutil.rmtree(small)
                shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(sys.argv[1:])
