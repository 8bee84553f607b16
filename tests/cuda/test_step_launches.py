"""What a recorded step launches: each costs a device microseconds, whatever it does."""

from __future__ import annotations

from collections import Counter

import torch
from devices import LLAMA, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from gptmanager.cuda.downloads import Downloads
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.cuda.launch import EmulatorLauncher
from gptmanager.cuda.streams import EmulatedStream
from gptmanager.cuda.uploads import Uploads
from gptmanager.executor.device_runner import DeviceRunner
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.model import load_model


class Launches(TorchDispatchMode, EmulatorLauncher):
    """All that a device would launch meanwhile: `names` of kernels, and of torch's operations that
    make or change tensors.
    """

    def __init__(self, has_products):
        TorchDispatchMode.__init__(self)
        EmulatorLauncher.__init__(self, has_products=has_products)
        self.names = []
        self.late = []  # kernels that begin when the one before them has ended

    def kernel(self, program, name, shared_mem=0):
        kernel = super().kernel(program, name, shared_mem)
        if not program.dependent:
            self.late.append(name)

        def launch(*arguments, **options):
            self.names.append(name.partition("<")[0])
            kernel(*arguments, **options)

        return launch

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        tensors = [it for it in (*args, result) if isinstance(it, torch.Tensor)]
        memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        is_new = isinstance(result, torch.Tensor) and memory[-1] not in memory[:-1]
        if "empty" not in name and (is_new or function._schema.is_mutable):
            self.names.append(name)
        return result


def recorded_step(num_layers, has_products=False):
    """What a recorded step of a narrow Llama launches."""
    config = {**LLAMA, "num_hidden_layers": num_layers}
    launches = Launches(has_products)
    stream = EmulatedStream(launches)
    model = load_model(
        (config, checkpoint(tuple(sorted(config.items(), key=str)))),
        kernels=CudaKernels(launches),
        device=stream.device,
        dtype="bfloat16",
    )
    sizes = {"token_major": True, "device": stream.device, "dtype": torch.bfloat16}
    pool = KvPool(num_layers, 4, 16, 1, 64, **sizes)
    tables = DeviceTables(2, 64, 4, stream.device)
    copies = Uploads(stream), Downloads(stream, 16)
    runner = DeviceRunner(model, pool, tables, stream, *copies, graph_sizes=(2,))
    inputs, logits = runner._graphs._graphs[2].inputs, runner._graphs._graphs[2].result
    assert logits.dtype is torch.bfloat16  # as the kernels that choose read them
    launches.names.clear()
    with torch.inference_mode(), launches:
        runner._step(inputs)
    assert not launches.late
    return Counter(launches.names)


def test_what_a_recorded_step_launches(toolchain):
    """Products, five kernels a layer, and once a step what is small and what follows the logits."""
    one, two = recorded_step(1), recorded_step(2)
    layer = {"norm": 2, "linear": 4, "rope_and_write": 1, "generation_attention": 1, "silu_mul": 1}
    assert two - one == Counter(layer)
    rest = Counter(["index_select", "to", "locate_tokens", "zeros", "embedding", "norm"])
    rest += Counter(["linear", "copy_"])  # logits, and their way to where the choice finds them
    assert one == rest + Counter(layer)


def test_a_step_with_products_as_kernels(toolchain):
    """Four products and four kernels a layer: the activation is a part of its product."""
    one, two = recorded_step(1, has_products=True), recorded_step(2, has_products=True)
    layer = {"norm": 2, "multiply": 4, "rope_and_write": 1, "generation_attention": 1}
    assert two - one == Counter(layer)
    rest = Counter(["index_select", "to", "locate_tokens", "zeros", "embedding", "norm"])
    rest += Counter(["multiply", "copy_"])
    assert one == rest + Counter(layer)
