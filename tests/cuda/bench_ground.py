"""A kernel benchmark on the emulator, tiny, with times that a test says."""

from __future__ import annotations

import torch

from gptmanager.bench.kernels.benchmark import BenchSetup
from gptmanager.bench.kernels.cases import Adapters, Decoder, Mixture, OtherLayers, Rig, Sizes
from gptmanager.bench.timing import Stopwatch
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape
from gptmanager.kernels.recurrent.state_space_formulas import StateSpaceShape

TINY = Sizes(
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    hidden=64,
    ffn=48,
    vocab_size=200,
    rows=3,
    tokens=10,
    batch=3,
    context=40,
    chunk=12,
    tokens_per_block=16,
    other_blocks=(32,),
    copied_blocks=2,
    num_layers=2,
    decoders=(Decoder("narrow", 64, 96, 48, 200),),
    matmul_rows=(1, 20),
    adapters=Adapters(3, 64, (8,)),
    others=OtherLayers(
        Mixture(64, 32, 6, 2, (1, 7)),
        DeltaShape(1, 2, 32, 24, 4),
        StateSpaceShape(2, 24, 16, 1, 4),
    ),
)


class FakeTimer:
    """Runs what it is given, and says that each call took as long as the list tells, in turn."""

    def __init__(self, *seconds):
        self.seconds = seconds or (1e-3,)
        self.num_prepared = 0

    def prepare(self, run, num_sets):
        for number in range(num_sets):
            run(number)
        self.num_prepared += 1
        calls = iter(range(10**9))
        return Stopwatch(lambda: self.seconds[next(calls) % len(self.seconds)], "graph")


def ground(launcher=None, sizes=TINY, timer=None, device="cpu", **options):
    rig = Rig(torch.device(device), launcher or EmulatorLauncher(), sizes, cache_bytes=100)
    return BenchSetup(rig, timer or FakeTimer(), copy_bytes=4096, matmul_width=16, **options)
