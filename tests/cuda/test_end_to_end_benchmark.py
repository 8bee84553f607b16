"""The end-to-end benchmark with CUDA kernels: on the emulator, and on a GPU where there is one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from checkpoints import checkpoint, random_model
from devices import GPU, LLAMA, there_is
from safetensors.torch import save_file
from small_scale import SMALL

from gptmanager.bench import EndToEndOptions, bench_end_to_end
from gptmanager.bench.table import end_to_end_table
from gptmanager.terminal.tables import lines

CONFIG = {**LLAMA, "num_hidden_layers": 1}
SCALE = replace(SMALL, requests=2, lengths=(2, 4), batches=(2,), contexts=(12,), max_batch_size=2)


@pytest.fixture(params=["emulator", GPU])
def device(request):
    return there_is(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    config, state = checkpoint(random_model(CONFIG))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_all_that_a_manager_does_on_a_gpu(device, folder, dtype):
    options = EndToEndOptions(device, folder, SCALE, ("check", "steps", "load"), dtype, quick=True)
    started = []
    report = bench_end_to_end(options, on_progress=lambda *given: started.append(given))
    assert report["check"]["status"] == "ok" and report["notes"] == []
    assert {(what, done == total) for what, done, total in started} >= {
        ("weights", True),
        ("CUDA graphs", True),
    }
    steps, load = report["steps"], report["load"]
    assert steps[0]["status"] == load[0]["status"] == "ok"
    assert lines(end_to_end_table(report))
    if device == "cuda":
        trace = steps[-1]["trace"]  # so few steps may be over before it begins
        assert trace["status"] == "ok" or trace["note"].endswith("nothing ran on the device")
        assert load[0]["host_ms_per_iteration"] > 0


@pytest.mark.gpu
def test_the_peer_on_a_gpu(folder):
    report = bench_end_to_end(EndToEndOptions(there_is("cuda"), folder, SCALE, ("transformers",)))
    assert report["transformers"]["status"] == "ok", report["transformers"]
