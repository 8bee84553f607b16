"""Ranks as processes: the commands under a launcher, and the host of docs/ranks.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from ranks_by_hand import free_port, outputs, start_ranks

ROOT = Path(__file__).resolve().parent.parent
MODEL = str(ROOT / "examples" / "tiny_llama")
PATIENCE_S = 120.0


def run_arguments(folder, *more):
    requests = folder / "requests.jsonl"
    lines = [{"prompt": text, "max_new_tokens": 12} for text in ("17 + 25 =", "a b c", "One ")]
    requests.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return ["-m", "gptmanager", "run", "--model", MODEL, "--requests", str(requests), *more]


def test_a_file_of_requests_runs_on_ranks_as_on_one(tmp_path):
    written = [str(tmp_path / name) for name in ("alone", "parts", "stages")]
    command = run_arguments(tmp_path, "--json", "--dtype", "float64", "--output")
    outputs(start_ranks([*command, written[0]], 1))
    outputs(start_ranks([*command, written[1], "--tensor-parallel-size", "2"], 2))
    told = outputs(start_ranks([*command, written[2], "--pipeline-parallel-size", "2"], 2))
    assert json.loads(told[0])["requests"] == 3 and told[1] == ""
    alone, parts, stages = (
        [json.loads(line)["output_ids"] for line in Path(path).read_text().splitlines()]
        for path in written
    )
    assert alone == parts == stages


def test_the_host_of_the_page_runs_under_torchrun(tmp_path):
    (host,) = re.findall(r"```python\n(# host.py\n.*?)```", page(), re.DOTALL)
    (tmp_path / "host.py").write_text(host)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = ["--master-port", str(free_port())]
    told = subprocess.run(
        [sys.executable, *launcher, *port, str(tmp_path / "host.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert told.returncode == 0, told.stderr
    assert sorted(told.stdout.splitlines()) == [
        "rank 0 sent 4 responses",
        "rank 1 sent 0 responses",
    ]


def page():
    return (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
