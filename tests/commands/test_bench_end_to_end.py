"""The end-to-end benchmark on the CPU: its parts, what it leaves out, and what it prints."""

from __future__ import annotations

import json
import math
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_load import TINY
from checkpoints import CONFIGS, checkpoint, expected_logits, random_model
from safetensors.torch import save_file
from small_scale import SMALL

from gptmanager import OptionalParams, cli
from gptmanager.bench import EndToEndOptions, bench_end_to_end
from gptmanager.bench.end_to_end import benchmark as end_to_end
from gptmanager.bench.end_to_end import workbench
from gptmanager.bench.end_to_end.dense_reference import (
    compare_logits,
    dense_logits,
    unsupported_reason,
)
from gptmanager.bench.end_to_end.device_trace import DeviceEvent
from gptmanager.bench.end_to_end.serving_parts import (
    Target,
    time_load,
    time_steps,
    trace_steps,
)
from gptmanager.bench.engine import IterationLog, Session
from gptmanager.bench.load import (
    LLAMA_8B,
    RandomLlama,
    random_llama,
    read_checkpoint,
    uniform_requests,
)
from gptmanager.bench.peers.transformers_peer import TooSlow, TransformersPeer
from gptmanager.bench.roofline import Ceilings, ModelShape
from gptmanager.bench.table import end_to_end_table
from gptmanager.bench.timing import Budget
from gptmanager.errors import ConfigError
from gptmanager.terminal.tables import lines

ROOT = Path(__file__).resolve().parents[2]
# torch 2.11 throws into generators as Python 3.12 does not like it
OF_TORCH = pytest.mark.filterwarnings("ignore:the .type, exc, tb. signature:DeprecationWarning")
SKIPPED = {"status": "skipped", "note": "no time left"}


@pytest.fixture(scope="module")
def llama():
    return random_model(CONFIGS["llama"])


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    config, state = checkpoint(llama)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def report(folder):
    return bench_end_to_end(EndToEndOptions("cpu", folder, SMALL))


def test_the_logits_are_those_of_the_reference(report):
    check = report["check"]
    assert check["status"] == "ok" and 0 < check["error"] < check["tolerance"] == 1e-3
    assert check["same_tokens"] == "64 of 64"


def test_steps_of_every_batch(report):
    rows = [row for row in report["steps"] if "trace" not in row]
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 24), (3, 24), (1, 40)]
    for row in rows:
        assert row["status"] == "ok" and row["steps"] >= 8
        assert row["best_ms"] <= row["median_ms"] and row["floor_ms"] > 0
        low, high = row["quartiles_ms"]
        assert low <= row["median_ms"] <= high
        speed = row["batch"] / row["median_ms"] * 1e3
        assert row["tokens_per_second"] == pytest.approx(speed, rel=0.01)


def test_loads(report):
    requests = uniform_requests(5, (3, 12), (3, 12), 96)
    for row, streaming in zip(report["load"], (False, True), strict=True):
        assert row["status"] == "ok" and row["streaming"] is streaming
        assert row["requests"] == 5
        assert row["tokens_in"] == sum(len(prompt) for prompt, _ in requests)
        assert row["tokens_out"] == sum(new_tokens for _, new_tokens in requests)
        assert 1 <= row["mean_batch"] <= 5 and row["pauses"] == 0
        assert row["share_of_roofline"] == pytest.approx(row["floor_s"] / row["seconds"], abs=0.1)
        assert row["time_to_first_token_ms"]["p50"] > 0
        assert "host_ms_per_iteration" not in row and "goal" not in row
    (row,) = report["saturated"]
    assert row["name"] == "6/4" and row["tokens_in"] == 30 and row["tokens_out"] == 20


def test_the_peer(report):
    peer = report["transformers"]
    assert peer["status"] == "ok" and peer["requests"] == 3
    assert peer["ratio"] == pytest.approx(peer["gptmanager"] / peer["transformers"], rel=0.02)


def test_policies_under_pressure(report):
    pressure = report["pressure"]
    no_evict, max_utilization = pressure["policies"].values()
    assert list(pressure["policies"]) == ["guaranteed_no_evict", "max_utilization"]
    assert no_evict["pauses"] == 0 and max_utilization["mean_batch"] > no_evict["mean_batch"]
    speeds = (max_utilization["output_tokens_per_second"], no_evict["output_tokens_per_second"])
    assert pressure["ratio"] == pytest.approx(speeds[0] / speeds[1], rel=0.01)
    tokens = [
        row["output_tokens_per_second"] * row["seconds"] for row in (no_evict, max_utilization)
    ]
    assert all(6 * 3 <= count <= 6 * 8 for count in tokens)  # none got 100


def test_what_a_report_is_of(report):
    assert report["version"] == 1
    assert report["model"]["hidden_size"] == 32 and report["model"]["dtype"] == "float32"
    assert report.keys() >= {"date", "machine", "versions", "ceilings", "seconds", "prepared_s"}
    assert report["device"] == {"name": "cpu"} and report["notes"] == []
    construction = report["construction"]
    assert construction["weights_s"] >= 0
    sizes = [own["max_batch_size"] for own in construction["managers"]]
    assert sizes == [8, 16] and all(own["made_s"] >= 0 for own in construction["managers"])
    json.dumps(report)


def test_a_model_that_the_reference_does_not_know(tmp_path):
    config, state = checkpoint(random_model(CONFIGS["llama_biased"]))
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    save_file({name: it.clone() for name, it in state.items()}, tmp_path / "model.safetensors")
    report = bench_end_to_end(EndToEndOptions("cpu", tmp_path, SMALL, only=("check",)))
    assert report["check"] == {"status": "skipped", "note": "no reference for biases"}
    assert report["model"]["dtype"] == "bfloat16"  # managers have the same
    bench = workbench.Workbench(EndToEndOptions("cpu", tmp_path, SMALL))
    bench.load(Budget(None))
    assert bench.weights is None and bench.shape.itemsize == 2


def test_the_table(report):
    told = lines(end_to_end_table(report))
    blocks = [line for before, line in zip(told, told[1:], strict=False) if not before]
    blocks = [line for line in blocks if line.isalpha()]
    assert blocks == ["check", "steps", "load", "transformers", "saturated", "pressure"]
    assert any(line.startswith("  correct: logits differ") for line in told)
    assert any(line.startswith("  3 x 24") for line in told)
    assert any(line.startswith("  5, streaming") for line in told)
    assert any(line.startswith("  3 requests: gptmanager ") for line in told)
    assert any(line.startswith("  5 x 6/4 ") for line in told)
    assert all(len(line) < 180 for line in told)


def test_random_weights_and_parts(monkeypatch):
    monkeypatch.setattr(workbench, "SMALL_LLAMA", TINY)
    options = EndToEndOptions("cpu", scale=SMALL, only=("check", "load"), quick=True)
    parts = []
    report = bench_end_to_end(options, on_start=lambda *given: parts.append(given))
    assert parts == [("check", 0, 2), ("load", 1, 2)] and "steps" not in report
    assert report["check"]["status"] == "ok" and len(report["load"]) == 1
    assert report["model"]["weights"] == "random"
    with pytest.raises(ConfigError, match="--only chek: must be one of check, "):
        bench_end_to_end(replace(options, only=("chek",)))


def test_goals_are_set_for_the_8b_model_on_a_gpu(monkeypatch):
    """Time of a step with 1024 tokens, and of the load without streaming."""
    asked = []

    def noted(target, requests=None, **given):
        asked.append(tuple(given.values()))
        return {}

    for name in ("time_steps", "trace_steps", "time_load"):
        monkeypatch.setattr(end_to_end, name, noted)
    stub = SimpleNamespace(trace=True)
    monkeypatch.setattr(workbench.Workbench, "target", lambda self, size=None: stub)
    monkeypatch.setattr(workbench.Workbench, "requests", [([1], 1)])

    def run(config, **options):
        bench = workbench.Workbench(EndToEndOptions("cpu", scale=workbench.GPU_SCALE, **options))
        bench.config = config
        parts = end_to_end.Parts(bench, Budget(), [])
        rows = [*parts.steps(), *parts.load()]
        assert len(rows) == len(asked)
        found, asked[:] = asked[:], []
        return found

    short = [(1, 1024, 64, 1.25), (32, 1024, 64, 1.25), (128, 1024, 64, 1.25)]
    long = [(batch, 4096, 64, None) for batch, *_ in short]
    loads = [(False, 1.43), (True, None)]
    trace = (256, 1024, 4 * 64)
    assert run(LLAMA_8B) == [*short, (256, 1024, 64, 1.25), *long, trace, *loads]
    quick = [(batch, 1024, 16, None) for batch in (1, 32, 128, 256)]
    assert run({**LLAMA_8B}, quick=True) == [*quick, (256, 1024, 4 * 16), (False, None)]


def test_the_order_of_the_parts():
    def names(**options):
        given = {"scale": SMALL, "ablations": ("int8",), **options}
        return end_to_end._part_names(workbench.Workbench(EndToEndOptions("cpu", **given)))

    usual = ["check", "steps", "load", "ablations", "transformers"]
    assert names() == [*usual, "saturated", "pressure"]
    assert names(scale=replace(SMALL, saturated=())) == [*usual, "pressure"]
    assert names(quick=True) == usual
    assert names(quick=True, only=("steps", "pressure")) == ["steps", "pressure", "ablations"]
    assert names(ablations=(), only=("load",)) == ["load"]


def test_no_time_left(folder):
    now = [0.0]

    def a_minute_later(name, number, count):
        now[0] += 61 if name == "steps" else 0

    options = EndToEndOptions("cpu", folder, SMALL, minutes=1)
    report = bench_end_to_end(options, on_start=a_minute_later, clock=lambda: now[0])
    skipped = [name for name in end_to_end.PARTS if report[name] == SKIPPED]
    assert skipped == ["steps", "load", "transformers", "saturated", "pressure"]
    assert report["notes"] == [f"{name}: no time left, skipped" for name in skipped]
    assert "  skipped: no time left" in lines(end_to_end_table(report))


def test_time_ends_within_the_steps(folder):
    readings = iter(range(0, 10**6, 7))
    options = EndToEndOptions("cpu", folder, SMALL, only=("steps",), minutes=1.1)
    report = bench_end_to_end(options, clock=lambda: next(readings))
    rows = report["steps"]
    assert 0 < len(rows) < 3 and len(report["notes"]) == 3 - len(rows)
    assert report["notes"][-1] == "steps of 1 x 40: no time left, skipped"


def test_a_part_or_row_that_fails_does_not_stop_the_others(folder, monkeypatch):
    def fail(*arguments, batch_size=3, streaming=True, **given):
        if batch_size == 3 and streaming:
            raise OSError("disk gone\nat once")
        work = time_steps if "context" in given else time_load
        sizes = {"batch_size": batch_size} if work is time_steps else {"streaming": streaming}
        return work(*arguments, **sizes, **given)

    for name in ("compare_logits", "time_steps", "time_load"):
        monkeypatch.setattr(end_to_end, name, fail)
    scale, reports = replace(SMALL, contexts=(24,), requests=2), []
    options = EndToEndOptions("cpu", folder, scale, only=("check", "steps", "load"))
    report = bench_end_to_end(options, on_report=lambda own: reports.append(json.dumps(own)))
    failed = {"status": "failed", "note": "OSError: disk gone"}
    assert report["check"] == failed
    assert [row["status"] for row in report["steps"][:2]] == ["ok", "failed"]
    assert report["steps"][1] == {"batch": 3, "context": 24, **failed}
    assert report["load"][0]["status"] == "ok"
    assert report["load"][1] == {"requests": 2, "streaming": True, **failed}
    names = "check", "steps of 3 x 24", "load, streaming"
    assert report["notes"] == [f"{name}: failed: disk gone" for name in names]
    told = lines(end_to_end_table(report))
    assert "  failed: OSError: disk gone" in told
    assert sum(line.endswith("  failed: OSError: disk gone") for line in told) == 3
    # what is left if it is killed
    found = [json.loads(own) for own in reports]
    assert [own["running"] for own in found] == ["check"] * 2 + ["steps"] * 4 + ["load"] * 4
    assert [len(own.get("steps", ())) for own in found[2:6]] == [0, 0, 1, 2]
    assert "running" not in report


def test_ablations_run_next_to_a_plain_run(folder, monkeypatch):
    made, session = [], workbench.Session

    def noted(source, params, **options):
        made.append((params.deterministic, params.cuda_graphs, params.weights_dtype))
        return session(source, params, **options)

    monkeypatch.setattr(workbench, "Session", noted)
    names = tuple(end_to_end.ABLATIONS)
    options = EndToEndOptions("cpu", folder, SMALL, ("load",), quick=True, ablations=names)
    report = bench_end_to_end(options)
    plain = False, True, None
    assert made == [
        *(plain, plain, (True, True, None), (False, False, None)),
        *((False, True, "int8"), (False, True, "fp8"), plain),
    ]
    plain, *others = report["ablations"]
    assert plain["name"] == "plain" and plain["ratio"] == 1
    expected = ["deterministic", "no graphs", "int8", "fp8", "flashinfer"]
    assert [row["name"] for row in others] == expected
    for row in others[-2:]:  # a CPU has neither
        assert row["status"] == "skipped" and "ratio" not in row
        assert any(note.startswith(f"{row['name']}: skipped: ") for note in report["notes"])
    assert "8-bit floats need a CUDA device of compute capability 8.9" in others[-2]["note"]
    assert "the library needs device = 'cuda'" in others[-1]["note"]
    for row in others[:-2]:
        speed = row["output_tokens_per_second"] / plain["output_tokens_per_second"]
        assert row["ratio"] == pytest.approx(speed, abs=1e-3)
        assert [step["batch"] for step in row["steps"]] == [1, 3]
    told = lines(end_to_end_table(report))
    assert "ablations" in told and any(line.startswith("  no graphs ") for line in told)
    for changed in ("deterministic=True", "cuda_graphs=False", "weights_dtype=int8"):
        assert any(line.startswith(f"  a manager of 8, {changed}:") for line in told)
    assert any(line.startswith("  fp8") and "skipped" in line for line in told)


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_ablation_that_fails_ends_no_other(folder, monkeypatch, capsys, is_refused):
    made, session = [], workbench.Session
    error = ConfigError("no library\nat all") if is_refused else OSError("no library\nat all")

    def failing(source, params, **options):
        made.append(params.attention_provider)
        if params.attention_provider == "flashinfer":
            raise error
        return session(source, params, **options)

    monkeypatch.setattr(workbench, "Session", failing)
    sizes = ["--lengths", "4:8", "--requests", "2", "--batches", "1", "--contexts", "8"]
    given = ["--device", "cpu", "--model", str(folder), "--only", "load", "--quick", *sizes]
    monkeypatch.setattr(
        sys, "argv", ["gptmanager", "bench", "e2e", *given, "--flashinfer", "--int8", "--json"]
    )
    assert cli.main() == (0 if is_refused else 1)
    assert made == ["own", "own", "flashinfer", "own"]
    plain, failed, int8 = json.loads(capsys.readouterr().out)["ablations"]
    status = "skipped" if is_refused else "failed"
    assert failed == {"name": "flashinfer", "status": status, "note": "no library"}
    assert plain["ratio"] == 1 and int8["ratio"] > 0


def test_a_card_that_is_not_there(monkeypatch):
    monkeypatch.setattr(end_to_end, "find_gpu", lambda instead: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="^device='cuda:1' must be one of cuda:0 to cuda:0"):
        bench_end_to_end(EndToEndOptions("cuda:1"))


def test_a_card_whose_context_is_broken_loses_no_report(monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    workbench.Workbench(EndToEndOptions("cuda")).close()


def test_interrupted(folder):
    def interrupt(name, number, count):
        if name == "steps":
            raise KeyboardInterrupt

    options = EndToEndOptions("cpu", folder, SMALL, quick=True)
    report = bench_end_to_end(options, on_start=interrupt)
    assert report["interrupted"] and report["check"]["status"] == "ok" and "load" not in report
    assert "note: interrupted" in lines(end_to_end_table(report))


def test_interrupted_while_it_loads(folder, monkeypatch):
    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(workbench, "read_checkpoint", interrupt)
    report = bench_end_to_end(EndToEndOptions("cpu", folder, SMALL))
    assert report["interrupted"] and "model" not in report
    assert "note: interrupted" in lines(end_to_end_table(report))


def test_a_peer_that_is_not_installed(folder, monkeypatch):
    monkeypatch.setattr(end_to_end, "find_spec", lambda name: None)
    report = bench_end_to_end(EndToEndOptions("cpu", folder, SMALL, only=("transformers",)))
    assert report["transformers"] == {"status": "skipped", "note": "not installed"}
    assert report["notes"] == ["transformers: not installed: skipped"]


@OF_TORCH
def test_a_peer_that_takes_too_long(folder, monkeypatch):
    monkeypatch.setattr(end_to_end, "_PEER_LIMIT_S", 1e-9)
    report = bench_end_to_end(EndToEndOptions("cpu", folder, SMALL, only=("transformers",)))
    peer = report["transformers"]
    tokens = sum(n for _, n in uniform_requests(5, (3, 12), (3, 12), 96)[:3])
    assert peer["transformers"] == pytest.approx(tokens / 1e-9)
    assert peer["note"] == "0 of 3 requests done after 1e-09 s: this rate is an upper bound"
    assert any("an upper bound" in line for line in lines(end_to_end_table(report)))


@OF_TORCH
def test_the_peer_stops_when_time_is_up():
    source = (TINY, random_llama(TINY, 0))
    peer = TransformersPeer(source, OptionalParams())
    with pytest.raises(TooSlow, match="0 of 1 requests done after 0 s"):
        peer.run([([1, 2, 3], 5)], limit_s=0)
    assert len(peer.run([([1, 2, 3], 5)], limit_s=60).outputs[0]) == 5


@pytest.mark.parametrize("family", ["llama", "llama_biased"])
def test_the_reference_is_transformers(family):
    model = random_model(CONFIGS[family])
    config, state = checkpoint(model)
    if family == "llama_biased":
        assert unsupported_reason(config) == "no reference for biases"
        return
    tokens = list(range(1, 40, 3))
    logits = dense_logits(config, state, tokens)
    torch.testing.assert_close(logits, expected_logits(model, tokens), rtol=1e-4, atol=1e-4)


def test_what_the_reference_does_not_know():
    assert "gpt2" in unsupported_reason({"model_type": "gpt2"})
    assert "llama3" in unsupported_reason(
        {"model_type": "llama", "rope_scaling": {"type": "llama3"}}
    )
    assert not unsupported_reason(TINY)


def test_wrong_weights_are_reported(llama):
    config, state = checkpoint(llama)
    spoiled = {name: weight.clone() for name, weight in state.items()}
    spoiled["model.layers.1.self_attn.v_proj.weight"] *= 1.1
    with Session((config, spoiled), OptionalParams(max_batch_size=2)) as session:
        found = compare_logits(session, config, state, [([1, 2, 3], 4)])
    assert found["status"] == "wrong" and found["error"] > found["tolerance"]


def test_the_load_others_use_is_drawn_in_their_order():
    requests = uniform_requests(3, (2, 4), (5, 6), 50)
    assert requests == uniform_requests(3, (2, 4), (5, 6), 50)
    assert all(2 <= len(prompt) <= 4 and 5 <= n <= 6 for prompt, n in requests)
    assert max(token for prompt, _ in requests for token in prompt) < 50


def test_a_checkpoint_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="model.safetensors"):
        read_checkpoint(tmp_path)


def stage(session, log, trace=None):
    return Target(session, log, TINY["vocab_size"], 64, 4, Ceilings(1e10, 1e11, "x"), None, trace)


@pytest.fixture
def session():
    log = IterationLog()
    params = OptionalParams(max_batch_size=4, max_num_tokens=64)
    with Session((TINY, random_llama(TINY, 0)), params, log=log) as session:
        yield stage(session, log)


def test_an_unknown_shape_has_no_floor(session):
    row = time_steps(session, 2, 20, 6, goal=1e9)
    assert row["status"] == "ok" and "floor_ms" not in row and "goal" not in row
    row = time_load(session, [([1, 2], 3)], goal=1e9)
    assert "floor_s" not in row and "goal" not in row  # no floor, no goal


def test_goals_are_multiples_of_the_floor(session):
    """The floor follows from the ceilings that the same run has measured."""
    known = replace(session, shape=ModelShape.of(TINY, 4, 4))
    for goal, is_met in ((1e9, True), (1e-9, False)):
        for row in (time_steps(known, 2, 20, 6, goal), time_load(known, [([1, 2], 3)], goal=goal)):
            assert row["goal"] == {"text": f"<= {goal:g} x floor", "met": is_met}
            assert row["times_floor"] > 0


def test_a_batch_that_the_cache_cannot_hold_is_left_out(session):
    session.session.warm_up()
    row = time_steps(session, 3000, 500, 6)
    assert row["status"] == "skipped" and "blocks of the KV cache, which has" in row["note"]
    traced = trace_steps(replace(session, trace=lambda seconds: []), 3000, 500, 6)
    assert traced["status"] == "skipped"
    assert time_steps(session, 2, 20, 6)["status"] == "ok"


def test_random_weights_are_drawn_when_they_are_asked_for():
    """The same each time, and nothing holds them."""
    weights = RandomLlama(TINY, 3)
    expected = random_llama(TINY, 3)
    assert {name: it.shape for name, it in weights.items()} == {
        name: it.shape for name, it in expected.items()
    }
    name = "model.layers.0.self_attn.q_proj.weight"
    first = weights[name]
    assert torch.equal(first, weights[name])
    assert not torch.equal(first, RandomLlama(TINY, 4)[name])
    assert not torch.equal(first, weights["model.layers.0.self_attn.o_proj.weight"])
    held = weakref.ref(first)
    del first
    assert held() is None


def test_a_batch_that_never_runs_as_a_whole(session):
    row = time_steps(session, 5, 20, 6)  # the session has at most 4
    assert row["status"] == "failed" and row["note"] == "the batch never ran at its full size"


def test_gaps_of_the_device_are_exposed_host_time(session):
    asked = []

    def trace(seconds):
        asked.append(seconds)
        return [
            DeviceEvent(0.0, 1.0, "nvjet_tst_128x8"),
            DeviceEvent(2.0, 3.5, "void generation_attention<__nv_bfloat16, 128, 1>()"),
            DeviceEvent(3.5, 3.7, "rms_norm"),
            DeviceEvent(3.7, 4.0, "void multiply<__nv_bfloat16, 4, true>()"),
        ]

    found = trace_steps(replace(session, trace=trace), 2, 20, 8)
    assert len(asked) == 2 and asked[0] == 0 and found["busy_share"] == 0.75  # once to begin with
    exposed = found["exposed_host_ms"]  # a quarter of the time
    assert found["split_ms"] == pytest.approx(
        {"attention": 1.5 * exposed, "gemm": 1.3 * exposed, "rest": 0.2 * exposed}, abs=1e-3
    )
    assert found["exposed_host_ms"] > 0 and found["goal"]["met"] is (
        found["exposed_host_ms"] <= 0.3
    )
    found = trace_steps(replace(session, trace=lambda seconds: []), 2, 20, 8)
    assert found == {"status": "failed", "note": "no trace: nothing ran on the device"}
    assert trace_steps(session, 2, 20, 8)["status"] == "skipped"


def test_host_time_is_reported_where_a_device_computes(session):
    row = time_load(replace(session, trace=lambda seconds: []), [([1, 2], 3)])
    assert row["host_ms_per_iteration"] > 0


def test_the_log_counts_whole_batches_only():
    log = IterationLog()
    for generation, context in [(1, 1), (2, 0), (2, 0), (2, 0), (2, 1), (2, 0), (1, 0)]:
        log(json.dumps({"Generation Requests": generation, "Context Requests": context}))
    assert len(log.step_seconds(2)) == 2
    assert all(math.isfinite(seconds) for seconds in log.step_seconds(2))
    assert len(log.step_seconds(2, start=2)) == 1
    log.restart()
    assert len(log) == 0 and log.host_milliseconds() is None


def test_the_command_on_a_cpu(capsys, tmp_path):
    arguments = ["bench", "e2e", "--device", "cpu", "--model", str(ROOT / "examples/tiny_llama")]
    arguments += ["--requests", "2", "--lengths", "3:5", "--batches", "1,2", "--contexts", "16"]
    file = tmp_path / "report.json"
    asked = ["--only", "check,steps,load", "--deterministic", "--output", str(file)]
    assert cli.main([*arguments, *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cpu" and any(line.startswith("  2 x 16 ") for line in lines)
    kept = json.loads(file.read_text())
    assert kept["load"][0]["requests"] == 2 and "transformers" not in kept
    assert [row["name"] for row in kept["ablations"]] == ["plain", "deterministic"]
    assert cli.main([*arguments, "--only", "load", "--quick", "--json", "--run-ahead", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["load"][0]["tokens_out"] > 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--minutes", "0"], "argument --minutes: must be a time in minutes"),
        (["--batches", "1,x"], "argument --batches: must be a positive integer, got 'x'"),
        (
            ["--lengths", "9:3"],
            "argument --lengths: must be LOW:HIGH with LOW at most HIGH, got '9:3'",
        ),
        (["--model", "nowhere"], "argument --model: must be a folder, a file, or a name"),
        (
            ["--output", "nowhere/x.json"],
            "argument --output: must be in an existing folder, got 'nowhere/x.json'",
        ),
        (["--output", "."], "argument --output: must be a file, got the folder '.'"),
        (
            ["--device", "tpu"],
            "argument --device: must be cpu, cuda, cuda:N or emulator, got 'tpu'",
        ),
    ],
)
def test_an_error_names_the_option(capsys, options, error):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", "e2e", *options])
    assert exit_.value.code == 2
    assert f"gptmanager bench e2e: error: {error}" in capsys.readouterr().err
