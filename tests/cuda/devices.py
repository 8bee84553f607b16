"""Where managers run in these tests, and a model whose heads CUDA kernels have."""

from __future__ import annotations

import pytest
from checkpoints import CONFIGS
from requirements import skip

from gptmanager.cuda import emulator
from gptmanager.cuda.streams import DeviceStream
from gptmanager.errors import ConfigError

WIDE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
LLAMA = {**CONFIGS["llama"], **WIDE}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def there_is(device):
    """`device`, or no test where there is none."""
    try:
        if device == "cuda":
            DeviceStream("cuda")
        elif device == "emulator":
            emulator.Toolchain()
    except ConfigError as error:
        skip(str(error))
    return device
