"""What each phase runs: steps in their order, the most informative first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PHASES = ("a", "b", "c")
OF_MACHINE = ("compile",)  # steps whose result no archive has: they run again on another machine
# Parts of `bench kernels`, those first that whole models cannot do without.
PARTS = (
    *("generation_attention", "context_attention", "matmuls", "norms", "activations"),
    *("cache_write", "sampling", "experts", "delta_rule", "state_space", "block_copy", "adapters"),
    *("adjustments", "token_masks", "log_probs", "beam_step"),
)
# Kernels that ncu looks at: the name in the source, and the part of `bench kernels` that runs it.
PROFILED = {
    "generation_attention": "generation_attention",
    "warpgroup_attention": "context_attention",
    "gemv": "matmuls",
    "gemm": "matmuls",
    "sample": "sampling",
}
SANITIZED = (
    *("test_generation_attention", "test_context_attention", "test_gemv"),
    *("test_gemm", "test_sampling_kernel"),
)
# Test files whose kernels a whole model needs; the others follow by name.
FIRST_FILES = (
    *("test_device_functions", "test_generation_attention", "test_context_attention"),
    *("test_gemm", "test_gemv", "test_sampling_kernel", "test_norms"),
    *("test_cache_write", "test_device_executor", "test_manager_on_gpu"),
)
BATCHES = "1,32,64,128,256"
CONTEXT = "1024"
SMALL = ("--model", "examples/tiny_llama", "--lengths", "32:128")  # launches take longest
FILE_S = 200.0  # a test file
_BEGIN_S = 15.0  # to import torch, and to make a model of random weights


@dataclass(frozen=True)
class Step:
    """One command. `limit_s`: it is ended after so many seconds, and `least_s`: it begins only if
    so many are left. Consecutive steps of one `lane` run side by side. `tool`: a program that must
    be installed, else the step is left out. `kind`: how the summary reads what it left.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    least_s: float = 20.0
    lane: str = ""
    tool: str = ""
    kind: str = "plain"
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """`root`: the checkout. `folder`: where the phase keeps its logs and results. `device`: where
    managers run that are compared with the CPU's.
    """

    root: Path
    folder: Path
    python: str
    device: str = "cuda"
    requests: str = "examples/requests.jsonl"

    def result(self, name: str, ending: str = "json") -> str:
        return str(self.folder / f"{name}.{ending}")

    def gptmanager(self, *arguments: str) -> tuple[str, ...]:
        return (self.python, "-m", "gptmanager", *arguments)

    def script(self, name: str, *arguments: str) -> tuple[str, ...]:
        return (self.python, f"tests/card/{name}.py", *arguments)


def steps_of(phase: str, setup: Setup) -> list[Step]:
    return {"a": _right, "b": _fast, "c": _profiled}[phase](setup)


def _right(setup: Setup) -> list[Step]:
    """Phase a: whether everything is right."""
    return [*_begin(setup), *_texts(setup), *_parts(setup), *_files(setup)]


def _begin(setup: Setup) -> list[Step]:
    """Kernels are compiled by all cores, while a CPU's manager answers the requests."""
    cpu = ("--device", "cpu", "--output", setup.result("texts-cpu", "jsonl"))
    return [
        Step("compile", _compiler(setup), 170, lane="begin"),
        Step("texts-cpu", (*_run(setup), *cpu), 170, lane="begin"),
    ]


def _compiler(setup: Setup, *arguments: str) -> tuple[str, ...]:
    arch = "device" if setup.device == "cuda" else "sm_90a"
    given = ("--workers", "0", "--arch", arch, *arguments)
    return (setup.python, "-m", "gptmanager.cuda.matrix", *given)


def _run(setup: Setup) -> tuple[str, ...]:
    sizes = ("--kv-cache-tokens", "16384", "--max-batch-size", "16")
    model = ("--model", "examples/tiny_llama", "--requests", setup.requests)
    return setup.gptmanager("run", *model, *sizes)


def _texts(setup: Setup) -> list[Step]:
    steps = []
    for name, dtype in (("texts-float32", "float32"), ("texts-bfloat16", "bfloat16")):
        output = setup.result(name, "jsonl")
        manager = ("--device", setup.device, "--dtype", dtype, "--output", output)
        told = (setup.result("texts-cpu", "jsonl"), output, "--least")
        least = "1.0" if dtype == "float32" else "0.7"  # rounded logits may change a text
        steps.append(Step(name, (*_run(setup), *manager), 75))
        compare = setup.script("compare_texts", *told, least)
        steps.append(Step(f"{name}-compared", compare, 10, least_s=5, kind="texts"))
    return steps


def _parts(setup: Setup) -> list[Step]:
    """A process a part: an error that sticks ends one part."""
    return [
        Step(f"kernels-{part}", _bench_kernels(setup, part, "torch,without"), 60, kind="kernels")
        for part in PARTS
    ]


def _bench_kernels(setup: Setup, part: str, peers: str) -> tuple[str, ...]:
    output = ("--output", setup.result(f"kernels-{part}"))
    given = ("--quick", "--only", part, "--peers", peers)
    return setup.gptmanager("bench", "kernels", *given, *output)


def _files(setup: Setup) -> list[Step]:
    """A process a file."""
    found = sorted(path.stem for path in (setup.root / "tests/cuda").glob("test_*.py"))
    ordered = [*(it for it in FIRST_FILES if it in found), *(it for it in found
               if it not in FIRST_FILES)]  # fmt: skip
    return [
        Step(name, _one_file(setup, name), FILE_S, lane="tests", kind="tests") for name in ordered
    ]


def _one_file(setup: Setup, name: str, *under: str) -> tuple[str, ...]:
    told = ("--outcomes", setup.result(name, "outcomes"))
    return setup.script("one_file", f"tests/cuda/{name}.py", *told, *under)


def _fast(setup: Setup) -> list[Step]:
    """Phase b: how fast it is, at the shape of Llama-3.1-8B. It takes several runs of 9 minutes."""

    def bench(
        name: str, kind: str, minutes: float, limit_s: float, switch: str, *given: str
    ) -> Step:
        which = {"model": "e2e", "kernels": "kernels"}[kind]
        sizes = ("--minutes", f"{minutes:g}", "--output", setup.result(name))
        command = setup.gptmanager("bench", which, *given, *sizes)
        # A benchmark that is cut off begins anew in the next run: one that would be is not begun.
        least_s = 60 * minutes + _BEGIN_S
        environment = {"GPTMANAGER_CUDA": switch} if switch else {}
        return Step(name, command, limit_s, least_s, kind=kind, environment=environment)

    def steps(
        name: str, parts: str, minutes: float, limit_s: float, switch: str = "", *further: str
    ) -> Step:
        sizes = ("--contexts", CONTEXT, "--batches", BATCHES)
        given = ("--only", parts, *sizes, *further)
        return bench(name, "model", minutes, limit_s, switch, *given)

    def kernels(
        part: str, peers: str, minutes: float, limit_s: float, switch: str = "", *further: str
    ) -> Step:
        name = f"kernels-{part.replace(',', '-')}" + (f"-{switch}" if switch else "")
        given = ("--only", part, "--peers", peers, *further)
        return bench(name, "kernels", minutes, limit_s, switch, *given)

    return [
        Step("compile", _compiler(setup, "--only", "bfloat16"), 120),
        steps("model", "check,steps,load", 2.5, 170),
        kernels("matmuls", "torch", 1.2, 100),
        kernels("attention", "torch,flashinfer,without", 1.2, 130),
        steps("model-8bits", "load", 2, 170, "", "--quick", "--int8", "--fp8"),
        steps("model-no-early", "steps,load", 1, 90, "no-early"),
        kernels("sampling", "torch", 0.4, 60),
        kernels("experts,delta_rule,state_space", "torch", 0.8, 90),
        steps("model-no-warpgroups", "load", 1, 90, "no-warpgroups"),
        *(
            steps(name, "load", 0.5, 60, switch, *SMALL)
            for name, switch in (("small", ""), ("small-no-mixed-graphs", "no-mixed-graphs"))
        ),
        *(
            kernels("attention", "none", 0.3, 45, switch, "--quick")
            for switch in ("carveout", "extra-syncwarp")
        ),
        # last, because FlashInfer may compile for minutes
        steps("model-flashinfer", "load", 1.5, 150, "", "--quick", "--flashinfer"),
    ]


def _profiled(setup: Setup) -> list[Step]:
    """Phase c: why it is as fast as it is, and what it touches that it must not."""
    steps = [Step("compile", _compiler(setup, "--only", "bfloat16"), 120)]
    for kernel, part in PROFILED.items():
        report = setup.result(kernel, "ncu-rep")
        chosen = ("-k", f"regex:^{kernel}$", "--launch-skip", "2", "--launch-count", "2")
        quick = ("bench", "kernels", "--quick", "--peers", "none", "--only", part)
        ncu = ("ncu", "--set", "full", "--clock-control", "none", *chosen, "-f", "-o", report)
        command = (*ncu, *setup.gptmanager(*quick))
        steps.append(Step(f"ncu-{kernel}", command, 75, tool="ncu"))
        details = ("ncu", "-i", report, "--page", "details", "--csv")
        steps.append(Step(f"ncu-{kernel}-read", details, 20, 5, tool="ncu", kind="ncu"))
    for tool in ("memcheck", "racecheck"):
        under = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes",
                 "all")  # fmt: skip
        for name in SANITIZED:
            told = ("--outcomes", setup.result(f"{tool}-{name}", "outcomes"), "--slow", "--under")
            command = setup.script("one_file", f"tests/cuda/{name}.py", *told, " ".join(under))
            steps.append(Step(f"{tool}-{name}", command, 150, lane=tool, tool=under[0],
                              kind="tests"))  # fmt: skip
    return steps
