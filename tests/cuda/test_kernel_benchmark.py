"""The kernel benchmark on the emulator: its cases are right, and it tells when they are not."""

from __future__ import annotations

import errno
import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_ground import TINY, FakeTimer, ground
from separate_device import DEVICE, SeparateStream, pin_in

from gptmanager import cli
from gptmanager.bench import KernelOptions, bench_kernels, main
from gptmanager.bench.kernels import attention_peers
from gptmanager.bench.kernels import benchmark as kernels
from gptmanager.bench.kernels.adapter_cases import adapter_cases
from gptmanager.bench.kernels.attention_cases import attention_cases
from gptmanager.bench.kernels.attention_peers import torch_varlen
from gptmanager.bench.kernels.benchmark import all_cases
from gptmanager.bench.kernels.cases import (
    OURS,
    Absent,
    Case,
    Goal,
    Mixture,
    Planned,
    Prepared,
    Rig,
    Sizes,
    largest_error,
)
from gptmanager.bench.kernels.expert_cases import _logits as expert_logits
from gptmanager.bench.kernels.expert_cases import expert_cases
from gptmanager.bench.kernels.kernel_runs import report as kernel_report
from gptmanager.bench.kernels.kernel_runs import run_case
from gptmanager.bench.kernels.logits_cases import logits_cases
from gptmanager.bench.kernels.matmul_cases import matmul_cases
from gptmanager.bench.kernels.paged_rows import attention_flops, paged_rows
from gptmanager.bench.kernels.recurrent_cases import recurrent_cases
from gptmanager.bench.kernels.sampling_cases import refused_share, sampling_cases
from gptmanager.bench.kernels.token_cases import token_cases
from gptmanager.bench.machine import card, find_gpu
from gptmanager.bench.roofline import Ceilings
from gptmanager.bench.table import _engine_cells, kernel_table
from gptmanager.bench.timing import Budget, DeviceTimer, Spread
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.errors import ConfigError, GptManagerError
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.terminal.tables import lines


class SpoilingLauncher(EmulatorLauncher):
    """Kernels whose first result is off."""

    def kernel(self, program, name, shared_mem=0):
        launch = super().kernel(program, name, shared_mem)

        def spoiled(grid, block, args, shared_mem=0):
            launch(grid, block, args, shared_mem)
            args[0].view(-1)[:1] += 1

        return spoiled


@pytest.fixture(scope="module")
def launcher(request):
    request.getfixturevalue("toolchain")
    return EmulatorLauncher()


@pytest.fixture(scope="module")
def report(launcher):
    """Return the report of a device that shares no memory with the host."""
    stream = SeparateStream()
    timer, launch_us = FakeTimer(1e-3, 2e-3, 3e-3), {"graph": 9.0}
    with stream, pytest.MonkeyPatch.context() as monkeypatch:
        pin_in([stream], monkeypatch)
        own = ground(stream.launcher, timer=timer, device=DEVICE, launch_us=lambda rig: launch_us)
        return bench_kernels(KernelOptions(command=("gptmanager", "bench", "kernels")), own)


def test_every_kernel_is_right(report):
    assert [row["case"] for row in report["kernels"]] == [case.name for case in all_cases(TINY)]
    for row in report["kernels"]:
        ours = row["engines"][OURS]
        assert ours["status"] == "ok" and 0 <= ours["error"] <= row["tolerance"], row
        assert ours["median_us"] == 2000 and ours["quartiles_us"] == [1000, 3000]
        assert ours["best_us"] == 1000 and ours["rounds"] == 20


def test_every_peer_in_torch_is_right(report):
    peers = {}
    for row in report["kernels"]:
        for name, engine in row["engines"].items():
            peers.setdefault(name, []).append(engine)
    assert {it["status"] for name in ("torch", "torch sort") for it in peers[name]} == {"ok"}
    statuses = [it["status"] for it in peers["torch sdpa, dense"]]
    assert statuses.count("ok") >= 4 and set(statuses) == {"ok", "absent"}
    assert all(it["times_ours"] == 1 for it in peers["torch"])


def test_a_missing_peer_is_noted_once(report):
    lines = [note for note in report["notes"] if note.startswith("flashinfer")]
    assert "flashinfer: not installed: skipped" in lines and len(lines) == len(set(lines))
    assert not any(note.startswith("torch sdpa") for note in report["notes"])


def test_shares_are_of_what_was_measured(report):
    ceilings, row = report["ceilings"], report["kernels"][0]
    ours = row["engines"][OURS]
    # 4096 bytes read and written in a millisecond at best, 2 * 16^3 operations
    assert ceilings["copy_tb_per_s"] == round(8192 / 1e-3 / 1e12, 4)
    assert ours["share_of_copy"] == pytest.approx(row["bytes"] / 2e-3 / (8192 / 1e-3), abs=1e-4)
    floor_s = max(row["bytes"] / (8192 / 1e-3), row["flops"] / (8192 / 1e-3))
    assert ours["share_of_roofline"] == pytest.approx(floor_s / 2e-3, abs=1e-4)
    assert row["floor_us"] == pytest.approx(floor_s * 1e6, rel=1e-3)


def test_what_a_report_is_of(report):
    assert report["version"] == 1
    assert report["command"] == ["gptmanager", "bench", "kernels"]
    assert report.keys() >= {"date", "machine", "device", "versions", "seconds"}
    assert report["launch_us"] == {"graph": 9.0}
    json.dumps(report)


def test_the_table(report):
    told = lines(kernel_table(report))
    assert "host time per launch: graph 9.0 us" in told
    assert any(line.startswith(f"    {OURS}  ") and "2,000.0" in line for line in told)
    assert any(line.startswith(f"    {OURS}  ") and " plan " in line for line in told)
    assert any("[<= 1.2 x 3 x 40: goal met]" in line for line in told)
    assert told.index("norms") < told.index("sampling")
    assert all(len(line) < 180 for line in told)
    count = len(report["kernels"])
    assert any(line.startswith(f"{count} cases: {count} ok; ") for line in told)


def test_a_first_use_of_seconds_is_reported():
    engine = {"status": "ok", "plan_us": 3.0, "timed_by": "events"}
    assert "by events; plan 3.0 us; first use 40 s" in _engine_cells(
        OURS, {**engine, "first_use_s": 40.0}
    )
    assert "by events; plan 3.0 us" in _engine_cells(OURS, {**engine, "first_use_s": 0.1})


def test_a_fast_wrong_kernel_is_wrong(toolchain):
    parts = (
        "norms",
        "generation",
        "QKV",
        "SiLU of",
        "adjustments",
        "log_probs",
        "beam_step",
        "adapters",
        "experts",
        "delta_rule",
        "state_space",
    )
    options = KernelOptions(only=parts)
    report = bench_kernels(options, ground(SpoilingLauncher()))
    for row in report["kernels"]:
        ours = row["engines"][OURS]
        assert ours["status"] == "wrong" and ours["error"] > row["tolerance"]
        assert not any(goal["met"] for goal in row["goals"])
        assert not any("times_ours" in it for it in row["engines"].values())
    assert any("WRONG: error" in line for line in lines(kernel_table(report)))


def test_selection(launcher):
    def names(**options):
        return [
            case.part for case in kernels.select_cases(all_cases(TINY), KernelOptions(**options))
        ]

    assert set(names(only=("attention",))) == {"generation_attention", "context_attention"}
    assert set(names(only=("RoPE", "block_copy"))) == {"cache_write", "block_copy"}
    assert len(names(quick=True)) < len(names())
    with pytest.raises(ConfigError, match="--only norm,atention|--only atention: no kernel"):
        names(only=("atention",))


def test_the_time_limit_skips_what_is_left(launcher):
    times = iter(range(0, 10**6, 10))
    own = ground(launcher, clock=lambda: next(times))
    report = bench_kernels(KernelOptions(minutes=5, only=("norms", "silu", "rope")), own)
    statuses = [row["engines"][OURS]["status"] for row in report["kernels"]]
    assert statuses[0] == "ok" and statuses[-1] == "skipped"
    assert statuses == sorted(statuses)
    note = f"time limit of 5 minutes: {statuses.count('skipped')} cases skipped"
    assert note in report["notes"]
    assert any("skipped" in line for line in lines(kernel_table(report)))


def test_a_killed_run_leaves_its_report_so_far(launcher, monkeypatch, tmp_path):
    file = tmp_path / "report.json"

    def killed(name, number, count):
        if number == 1:
            raise SystemExit

    monkeypatch.setattr(
        main,
        "bench_kernels",
        lambda options, **hooks: bench_kernels(
            options, ground(launcher), **{**hooks, "on_start": killed}
        ),
    )
    with pytest.raises(SystemExit):
        cli.main(["bench", "kernels", "--only", "norms", "--output", str(file)])
    kept = json.loads(file.read_text())
    assert len(kept["kernels"]) == 1 and kept["ceilings"] and "interrupted" not in kept
    assert kept["running"].startswith("norms, ") and kept["running"] != kept["kernels"][0]["case"]


def test_a_report_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch):
    file, link = tmp_path / "report.json", tmp_path / "link.json"
    link.symlink_to(file)
    main._write_report(link, {"parts": 1})
    main._write_report(Path("/dev/null"), {"parts": 1})
    assert Path("/dev/null").is_char_device() and {*tmp_path.iterdir()} == {link, file}
    write = Path.write_bytes

    def fill_the_disk(path, content):
        write(path, content[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_the_disk)
    with pytest.raises(
        GptManagerError, match="link.json cannot be written: No space left on device"
    ):
        main._write_report(link, {"parts": 2})
    assert json.loads(file.read_text()) == {"parts": 1} and {*tmp_path.iterdir()} == {link, file}


def interrupted_at_the_second(name, number, count):
    if number == 1:
        raise KeyboardInterrupt


def test_an_interrupted_run_reports_what_it_has(launcher):
    own = ground(launcher)
    report = bench_kernels(KernelOptions(only=("norms",)), own, on_start=interrupted_at_the_second)
    assert report["interrupted"] and len(report["kernels"]) == 1
    assert "interrupted after 1 of 2 cases" in report["notes"]


def case_of(ours, peers=None, **options):
    """A case whose right result is [[1, 2]]."""
    expected = torch.tensor([[1.0, 2.0]])
    prepared = Prepared(2, ours, largest_error(expected), 0.01, peers or {})
    return Case("part", "case", 80, lambda rig: prepared, flops=10, **options)


def run_one(case, rig=None, **options):
    rig = rig or Rig(torch.device("cpu"), None, TINY)
    options = {"rounds": 3, "budget": Budget(), **options}
    return run_case(case, rig, FakeTimer(), **options)


def right(number):
    return torch.tensor([[1.0, 2.0]])


def test_whatever_a_peer_does_the_others_run():
    def absent():
        raise Absent("too old")

    def failing():
        raise OSError("no such file\nand more")

    def wrong(number):
        return torch.tensor([[1.0, math.nan]])

    def interrupted():
        raise KeyboardInterrupt

    peers = {"a": absent, "b": failing, "c": lambda: wrong, "d": lambda: right}
    entries = run_one(case_of(right, peers)).entries
    told = {name: (entry.status, entry.note) for name, entry in entries.items()}
    assert told[OURS] == told["d"] == ("ok", "")
    assert told["a"] == ("absent", "too old: skipped")
    assert told["b"] == ("failed", "OSError: no such file")
    assert told["c"] == ("wrong", "error inf, allowed 0.01")
    assert set(run_one(case_of(right, peers), peers=("d",)).entries) == {OURS, "d"}
    with pytest.raises(KeyboardInterrupt):
        run_one(case_of(right, {"e": interrupted}))


def test_ours_may_fail():
    def fails(number):
        raise RuntimeError("illegal address")

    result = run_one(case_of(fails, {"d": lambda: right}))
    assert result.ours.status == "failed" and result.ours.spread is None
    assert result.entries["d"].status == "ok" and result.times("d") is None

    def unprepared(rig):
        raise MemoryError("out of memory")

    result = run_one(replace(case_of(right), prepare=unprepared))
    assert result.ours.note == "MemoryError: out of memory"


def test_a_case_for_which_there_is_no_memory(launcher):
    """All sets of its inputs, twice: a peer has some of them in a form of its own."""
    for free, status in ((1599, "skipped"), (1600, "ok")):
        rig = Rig(
            torch.device("cpu"), launcher, TINY, cache_bytes=266, free_bytes=partial(int, free)
        )
        result = run_case(case_of(right), rig, FakeTimer(), rounds=3, budget=Budget())
        assert rig.num_sets(80) == 10 and result.ours.status == status
    rig = replace(rig, free_bytes=lambda: 0)
    result = run_case(case_of(right), rig, FakeTimer(), rounds=3, budget=Budget())
    assert result.ours.note == "needs about 0.0 GiB of memory, 0.0 are free"


def test_goals():
    ceilings, spread = Ceilings(1e5, 1e4, "float32"), Spread(1e-3, 1e-3, (1e-3, 1e-3), 1)
    case = case_of(right)  # 80 bytes and 10 operations in a millisecond: 80 % of a copy
    for goal, is_met in [
        (Goal("copy", 0.8), True),
        (Goal("copy", 0.81), False),
        (Goal("matmul", 1.0), True),
        (Goal("matmul", 1.1), False),
        (Goal("times", 1.2, "other"), True),
        (Goal("times", 0.9, "other"), False),
        (Goal("roofline", 1.26), True),  # 80 bytes take 0.8 ms, 10 operations 1 ms
        (Goal("roofline", 0.99), False),
    ]:
        assert goal.is_met(case, spread, ceilings, 1e-3) is is_met, goal


def test_a_goal_that_names_a_case_that_did_not_run_is_not_judged(launcher):
    report = bench_kernels(KernelOptions(only=("3 x 40", "1, 2 x 79")), ground(launcher))
    rows = {row["case"]: row for row in report["kernels"]}
    assert [goal["text"] for goal in rows["1 x 1, 2 x 79"]["goals"]] == ["<= 1.2 x 3 x 40"]
    report = bench_kernels(KernelOptions(only=("1, 2 x 79",)), ground(launcher))
    assert not report["kernels"][0]["goals"]


def test_ours_is_not_slower_than_a_peer():
    goal = Goal("peer", 1.0, "d")
    ceilings = Ceilings(1e5, 1e4, "float32")

    def goals(**peers):
        timer = FakeTimer(1e-3)
        case = case_of(
            right, {name: lambda run=run: run for name, run in peers.items()}, goals=(goal,)
        )
        rig = Rig(torch.device("cpu"), None, TINY)
        result = run_case(case, rig, timer, rounds=3, budget=Budget())
        return kernel_report([result], ceilings)[0]["goals"]

    assert goals(d=right) == [{"text": "<= 1 x d", "met": True}]
    assert goals(e=right) == []  # no such peer is there
    assert goals(d=lambda number: torch.zeros(1, 2)) == []
    spread = Spread(1e-3, 1e-3, (1e-3, 1e-3), 1)
    assert not goal.is_met(case_of(right), spread, ceilings, 0.99e-3)


def test_every_attention_case_has_a_peer_to_beat():
    peers = {
        case.part: {goal.of for goal in case.goals if goal.kind == "peer"}
        for case in all_cases(TINY)
        if case.part.endswith("attention")
    }
    assert peers == {
        "generation_attention": {"flashinfer"},
        "context_attention": {"flashinfer fa2"},
    }


def test_both_kernels_of_context_attention_are_compared(toolchain):
    options = KernelOptions(only=("context",), quick=True)
    report = bench_kernels(options, ground(EmulatorLauncher(has_warpgroups=True)))
    for row in report["kernels"]:
        both = {name: row["engines"].get(name) for name in (OURS, "without warpgroups")}
        if "fp8" in row["case"]:
            assert both["without warpgroups"] is None  # there is one for these
        else:
            assert all(it["status"] == "ok" for it in both.values()), both


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_matmuls_with_weights_in_8_bits(toolchain, monkeypatch, stored):
    """Both kernels are right, or the case is skipped on a device without 8-bit floats."""
    monkeypatch.setattr("gptmanager.bench.kernels.matmul_cases._LARGE", 1)
    launcher, names = EmulatorLauncher(), []
    kernel = launcher.kernel

    def noted(program, name, shared_mem=0):
        names.append(name)
        return kernel(program, name, shared_mem)

    monkeypatch.setattr(launcher, "kernel", noted)
    options = KernelOptions(only=(f"QKV of narrow, {stored}",))
    first, *_ = rows = bench_kernels(options, ground(launcher))["kernels"]
    assert [row["engines"][OURS]["status"] for row in rows] == ["ok", "ok"]
    assert names and all(("fp8" in name) is (stored == "fp8") for name in names)
    assert 0 <= first["engines"][OURS]["error"] <= first["tolerance"]
    assert first["engines"]["torch"]["error"] > 1e-3, "torch multiplies by the weight in 16 bits"
    monkeypatch.setattr(launcher, "has_fp8", False)
    report = bench_kernels(options, ground(launcher))
    is_skipped = stored == "fp8"
    statuses = [row["engines"][OURS]["status"] for row in report["kernels"]]
    assert statuses == 2 * ["skipped" if is_skipped else "ok"]
    why = "2 cases skipped: weights in 8-bit floats need compute capability 8.9 or later"
    assert (why in report["notes"]) is is_skipped


def test_matmuls_with_weights_in_4_bits(toolchain, monkeypatch):
    monkeypatch.setattr("gptmanager.bench.kernels.matmul_cases._LARGE", 1)
    options = KernelOptions(only=("narrow, int4",))
    rows = bench_kernels(options, ground(EmulatorLauncher()))["kernels"]
    assert len(rows) == 4 * 2
    for row in rows:
        ours, peer = row["engines"][OURS], row["engines"]["torch"]
        assert ours["status"] == peer["status"] == "ok" and 0 <= ours["error"] <= row["tolerance"]


def test_products_of_both_models():
    """Each reads its weight once, and those that are large have goals by that."""
    cases = {case.name: case for case in matmul_cases(Sizes())}
    narrow = {name: cases.pop(name) for name in [*cases] if ", int4, " in name}
    assert len(narrow) == 5 * 4, "neither with SiLU nor of 256 rows"
    for name, case in narrow.items():
        assert "<= 0.4 x torch" in texts(case) and case.quick == (", 1 x" in name or ", 64" in name)
        assert 0.28 <= case.num_bytes / cases[name.replace(", int4", "")].num_bytes < 0.34
    for stored in (", int8", ", fp8"):
        narrow = {name: cases.pop(name) for name in [*cases] if f"{stored}, " in name}
        for name, case in narrow.items():  # of the large weights, next to torch with 16 bits
            assert "<= 0.65 x torch" in texts(case) and len(texts(case)) == 2
            assert 0.5 <= case.num_bytes / cases[name.replace(stored, "")].num_bytes < 0.63
        assert len(narrow) == 6 * 5
    assert len(cases) == 2 * 5 * 5
    of_hidden = {"0.5B": (896, 1152, 9728, 4864, 151936), "8B": (4096, 6144, 28672, 14336, 128256)}
    for model, (hidden, qkv, gate_up, ffn, vocab_size) in of_hidden.items():
        for rows in (1, 4, 16, 64, 256):
            for name, depth, width, out in (
                ("QKV", hidden, qkv, qkv),
                ("output", hidden, hidden, hidden),
                ("gate-up + SiLU", hidden, gate_up, ffn),
                ("down", ffn, hidden, hidden),
                ("head", hidden, vocab_size, vocab_size),
            ):
                case = cases[f"{name} of {model}, {rows} x {depth} x {width}"]
                assert case.num_bytes == 2 * (width * depth + rows * (depth + out))
                assert case.flops == 2 * rows * width * depth
    large = {name for name in cases if "of 8B" in name or "head" in name}
    more = {name for name in large if ", 64 x" in name or ", 256 x" in name}
    assert {name for name, case in cases.items() if ">= 85% of copy" in texts(case)} == large - more
    assert {name for name, case in cases.items() if "<= 1.3 x roofline" in texts(case)} == more
    assert all("<= 1 x torch" in texts(case) for case in cases.values())
    assert {name for name, case in cases.items() if case.quick} == {
        name for name in large if ", 1 x" in name or ", 256 x" in name
    }


def test_experts_read_what_their_tokens_choose():
    cases = {case.name: case for case in expert_cases(Sizes())}
    for tokens, num_read in ((1, 8), (32, 128), (256, 128), (4096, 128)):
        for kind, itemsize in (("", 2), (", int8", 1)):
            case = cases.pop(f"{tokens} x 2048, 8 of 128 x 768{kind}")
            weights = num_read * 3 * 768 * 2048
            assert case.num_bytes == weights * itemsize + 2 * 2 * tokens * 2048
            assert case.flops == 2 * tokens * 8 * 3 * 768 * 2048
            assert case.quick == (not kind or tokens == 1)
    assert not cases


def test_tokens_choose_experts_in_turn(launcher):
    """So that no set of inputs finds in the cache what another one has read."""
    rig = Rig(torch.device("cpu"), launcher, TINY)
    for tokens, num_sets in ((1, 6), (3, 2), (7, 1)):
        sets = expert_logits(rig, Mixture(64, 32, 12, 2), tokens)
        chosen = [it.topk(2, dim=1).indices.flatten().tolist() for it in sets]
        assert len(sets) == num_sets
        assert sorted(it for own in chosen for it in {*own}) == list(range(12))


def test_recurrent_layers_read_and_write_their_memories():
    cases = recurrent_cases(Sizes())
    for part, own, heads, memory, channels, tokens in (
        ("delta_rule", cases[:4], 32, (128, 128), 8192, 2 * (8192 + 2 * 4096) + 4 * 2 * 32),
        ("state_space", cases[4:], 128, (128, 64), 8448, 2 * (2 * 8192 + 8448 + 128)),
    ):
        text = f"{heads} heads of {memory[0]} x {memory[1]}"
        spans = "1 x 1", "32 x 1", "256 x 1", "1 x 512"
        assert [(it.part, it.name) for it in own] == [(part, f"{it}, {text}") for it in spans]
        *_, generation, context = own
        memories, inputs = 2 * 256 * 4 * heads * memory[0] * memory[1], 2 * 256 * 2 * 3 * channels
        assert generation.num_bytes == memories + inputs + 256 * tokens
        assert context.num_bytes == (memories + inputs) // 256 + 512 * tokens
        assert texts(generation) == ["<= 1.3 x roofline", "<= 1 x torch"]
        assert texts(context) == ["<= 1 x torch"]


def test_adapters_read_each_weight_once():
    """A and B of 64 adapters, rows of x, and what they add to, read and written."""
    cases = {case.name: case for case in adapter_cases(Sizes())}
    for name, num_modules in (("Q, K, V", 3), ("output", 1)):
        for rank in (8, 64):
            case = cases.pop(f"{name} of rank {rank}, 256 x 1024 over 64")
            weights = 64 * num_modules * rank * (1024 + 1024)
            assert case.num_bytes == 2 * (weights + 256 * 1024 * (1 + 2 * num_modules))
            assert case.flops == 2 * 256 * num_modules * rank * (1024 + 1024)
            assert texts(case) == ["<= 1.3 x roofline"] and case.quick == (rank == 8)
    assert not cases


def test_attention_reads_each_page_once():
    """A context also reads its queries and writes as many results."""
    cases, page, head = attention_cases(Sizes()), 2 * 8 * 128, 4 * 32 * 128
    fast, fa2 = ["<= 1 x flashinfer"], ["<= 1 x flashinfer fa2"]
    of_copy, of_matmul = [">= 85% of copy", *fast], [">= 50% of matmul", *fa2]
    all_rows, chunk = 32 * 4096, 512 * 3584 + 512 * 513 // 2
    context = [2 * page * 4 * 4096, page * 4 * 4096]  # of pages in 2 bytes, and in 1
    queries = 2 * 2 * 32 * 128 * 4 * 512
    whole = 2 * page * 4096 + 2 * 2 * 32 * 128 * 4096
    assert [(it.name, it.num_bytes, it.flops, texts(it), it.quick) for it in cases] == [
        ("32 x 4096", 2 * page * all_rows, head * all_rows, of_copy, True),
        (
            *("16 x 128, 16 x 8064", 2 * page * all_rows, head * all_rows),
            *(["<= 1.2 x 32 x 4096", *fast], True),
        ),
        ("31 x 1024, one 99328", 2 * page * all_rows, head * all_rows, fast, False),
        ("1 x 1024", 2 * page * 1024, head * 1024, fast, True),
        ("32 x 4096, fp8", page * all_rows, head * all_rows, fast, True),
        ("32 x 4096, blocks of 16", 2 * page * all_rows, head * all_rows, fast, False),
        ("32 x 4096, blocks of 32", 2 * page * all_rows, head * all_rows, fast, False),
        ("4096 causal", whole, head * 4096 * 4097 // 2, of_matmul, True),
        ("4 chunks of 512 up to 4096", context[0] + queries, 4 * head * chunk, fa2, True),
        ("4 chunks of 512 up to 4096, fp8", context[1] + queries, 4 * head * chunk, fa2, True),
        ("8 x 1024 causal", 2 * whole, 8 * head * 1024 * 1025 // 2, fa2, False),
    ]


def test_what_other_kernels_read_and_write():
    cases = [*token_cases(Sizes()), *sampling_cases(Sizes()), *logits_cases(Sizes())]
    vocab, size = 128256, "256 x 128256"
    assert [(it.name, it.num_bytes, texts(it), it.quick) for it in cases] == [
        *(
            (f"{name}, {rows}{unit}", 2 * rows * numbers, [], True)
            for name, numbers, unit in (
                ("add + RMSNorm", 4 * 4096, " x 4096"),  # both are read and written
                ("SiLU * up", 3 * 14336, " x 14336"),
                ("RoPE + KV write", 2 * (32 + 2 * 8) * 128, " tokens"),
            )
            for rows in (256, 8192)
        ),
        ("32 blocks of 64 in 32 layers", 2 * 2 * 32 * 32 * 64 * 8 * 128, [], True),
        *(
            (f"{name}, {size}", 256 * vocab * 4, goals, quick)
            for name, goals, quick in (
                ("top-k 50, top-p 0.9, peaked", ["<= 3 x roofline"], True),
                ("top-p 0.9, peaked", ["<= 3 x roofline"], True),
                ("top-p 0.9, flat", ["<= 3 x roofline"], True),
                ("top-k 1000, flat", ["<= 3 x roofline"], False),
                ("greedy", [], False),
            )
        ),
        *(
            (f"{name}, {size}", 256 * of_row, [], True)
            for name, of_row in (
                ("penalties over 1024 tokens, 64 biases", 1024 * 12 + 64 * 16),
                ("64 allowed", vocab // 8 + 4 * (vocab - 64)),
                ("of one token", 4 * vocab + 12),
                ("8 best", 4 * vocab + 8 * 8),
            )
        ),
    ]


def texts(case):
    return [goal.text for goal in case.goals]


def test_plans_and_compilation_are_timed_apart(report, monkeypatch):
    for row in report["kernels"]:
        ours = row["engines"][OURS]
        assert ours["first_use_s"] >= 0
        assert ("plan_us" in ours) is row["part"].endswith("attention")
    planned, now = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def compiled():
        now[0] += 40  # seconds of compilation
        return Planned(right, plan)

    def plan():
        planned.append(1)
        now[0] += 3

    entry = run_one(case_of(right, {"d": compiled})).entries["d"]
    assert entry.first_use_s == 40 and entry.plan_s == 3
    assert len(planned) > 1 and entry.spread.median == 1e-3


class FakeWrapper:
    """FlashInfer's, as far as the benchmark calls it."""

    def __init__(self, workspace, kv_layout, **options):
        self.plans = []

    def plan(self, *arguments, **options):
        self.plans.append((arguments, options))

    def run(self, queries, pages):
        return queries


def test_what_flashinfer_plans(monkeypatch):
    library = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FakeWrapper,
        BatchPrefillWithPagedKVCacheWrapper=FakeWrapper,
    )
    monkeypatch.setattr(attention_peers, "flashinfer", lambda: library)
    rig = Rig(torch.device("cpu"), None, TINY)
    sets = [paged_rows(rig, [(2, 20), (1, 32)], 16, number) for number in range(2)]
    for peer in (
        attention_peers.flashinfer_generation(sets),
        attention_peers.flashinfer_context(sets, "fa2"),
    ):
        assert peer(1) is sets[1].queries
        peer.plan()
        wrapper = peer.plan.func.__self__
        (first, options), again = wrapper.plans
        assert again == (first, options) and options["q_data_type"] is sets[0].queries.dtype
        starts, pages, last, *numbers = first[-7:]
        assert starts.tolist() == [0, 2, 4] and last.tolist() == [4, 16]
        assert pages.tolist() == sets[0].spans.block_tables.flatten().tolist()
        assert numbers == [4, 2, 64, 16]


def test_the_largest_error_is_of_each_row():
    error = largest_error(torch.tensor([[100.0, 0.0], [0.01, 0.0]]))
    assert error(torch.tensor([[100.0, 0.0], [0.01, 0.0]])) == 0
    assert error(torch.tensor([[101.0, 0.0], [0.01, 0.0]])) == pytest.approx(0.01)
    assert error(torch.tensor([[100.0, 0.0], [0.02, 0.0]])) == pytest.approx(1)
    assert error(torch.tensor([[100.0, math.nan], [0.01, 0.0]])) == math.inf


def test_flops_count_pairs_that_are_seen():
    assert attention_flops(2, 8, [(1, 10)]) == 4 * 2 * 8 * 10
    assert attention_flops(2, 8, [(3, 3)]) == 4 * 2 * 8 * 6
    assert attention_flops(2, 8, [(2, 5)]) == 4 * 2 * 8 * (4 + 5)


def test_sets_of_inputs_are_larger_than_the_cache():
    rig = Rig(torch.device("cpu"), None, TINY, cache_bytes=100)
    assert rig.num_sets(1000) == 2
    assert rig.num_sets(30) == 10
    assert rig.num_sets(1) == 64
    assert replace(rig, cache_bytes=0).num_sets(1) == 1
    sets = [paged_rows(rig, [(1, 40)], 16, number) for number in range(8)]
    pages = [rows.spans.block_tables.tolist() for rows in sets]
    assert len(set(map(str, pages))) > 1


def test_tokens_that_limits_refuse():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(4, 1)
    tokens = torch.arange(4, dtype=torch.int32)
    limits = SamplingParams(greedy=False, top_k=2)
    assert refused_share(logits, limits, tokens) == 0.5
    limits = SamplingParams(greedy=False, top_p=0.6)  # the first alone has 0.64
    assert refused_share(logits, limits, tokens) == 0.75
    assert refused_share(logits, replace(limits, temperature=2.0), tokens) == 0.5
    assert refused_share(logits, SamplingParams(), tokens) == 0.75
    assert refused_share(logits, SamplingParams(), tokens - 1) == 0.75
    assert refused_share(logits, SamplingParams(greedy=False), tokens + 9) == 1


def test_an_older_torch_is_reported(monkeypatch):
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None):
        raise AssertionError("called")

    monkeypatch.setattr(
        "gptmanager.bench.kernels.attention_peers._find_varlen", lambda: varlen_attn
    )
    with pytest.raises(Absent, match="varlen_attn has no window_size"):
        torch_varlen([])


def test_the_command(launcher, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        main,
        "bench_kernels",
        lambda options, **hooks: bench_kernels(options, ground(launcher), **hooks),
    )
    file = tmp_path / "report.json"
    arguments = ["bench", "kernels", "--only", "norms,silu", "--peers", "torch"]
    assert cli.main([*arguments, "--minutes", "3", "--output", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "norms" in lines and "activations" in lines and "sampling" not in lines
    kept = json.loads(file.read_text())
    assert {name for row in kept["kernels"] for name in row["engines"]} == {OURS, "torch"}
    assert cli.main([*arguments, "--json", "--quick"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["kernels"][0]["engines"][OURS]["rounds"] == 5


def test_the_command_fails_where_a_kernel_is_wrong(toolchain, monkeypatch, capsys):
    monkeypatch.setattr(
        main,
        "bench_kernels",
        lambda options, **hooks: bench_kernels(options, ground(SpoilingLauncher()), **hooks),
    )
    assert cli.main(["bench", "kernels", "--only", "norms"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_an_interrupted_command_prints_what_it_has(launcher, monkeypatch, capsys):
    monkeypatch.setattr(
        main,
        "bench_kernels",
        lambda options, **hooks: bench_kernels(
            options, ground(launcher), **{**hooks, "on_start": interrupted_at_the_second}
        ),
    )
    assert cli.main(["bench", "kernels", "--only", "norms"]) == 130
    out, err = capsys.readouterr()
    assert "note: interrupted after 1 of 2 cases" in out
    assert err.splitlines()[-1] == "gptmanager: interrupted"


@pytest.mark.parametrize("name", ["kernels", "e2e"])
def test_without_a_gpu_one_line_says_so(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", name]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1
    assert err.startswith(f"gptmanager: no CUDA device: torch {torch.__version__} finds none; ")


def test_a_device_that_cupy_does_not_find(monkeypatch):
    def find_cupy():
        raise ConfigError("CuPy is not there")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("gptmanager.bench.machine.find_cupy", find_cupy)
    with pytest.raises(
        ConfigError, match="^no CUDA device for kernels: CuPy is not there; buy one"
    ):
        find_gpu("buy one")


def test_a_report_describes_the_gpu_in_use(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho GPU-a1, 580.1, 1410, 300\necho GPU-b2, 580.1, 1980, 700\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = SimpleNamespace(
        name="B",
        total_memory=2**30,
        multi_processor_count=4,
        major=9,
        minor=0,
        uuid="b2",
        L2_cache_size=1,
    )
    runtime = SimpleNamespace(driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13000)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr("gptmanager.bench.machine.find_cupy", lambda: cupy)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: found)
    assert card().items() >= {"name": "B", "clock": "1980", "power_limit": "700"}.items()
    found.uuid = "c3"  # `nvidia-smi` does not list it
    assert "clock" not in card()


@pytest.mark.gpu
def test_on_the_gpu(device_machine):
    rig = Rig(torch.device("cuda"), device_machine.launcher, TINY, cache_bytes=1 << 20)
    own = kernels.BenchSetup(rig, DeviceTimer(1e-4), 1 << 20, 64, kernels.launch_costs)
    report = bench_kernels(KernelOptions(), own)
    for row in report["kernels"]:
        ours = row["engines"][OURS]
        assert ours["status"] == "ok" and ours["timed_by"] == "graph", row
    assert report["device"]["name"] and report["launch_us"].keys() == {
        "kernel",
        "torch op",
        "graph",
    }
