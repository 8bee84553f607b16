"""A server of an unprivileged user: nothing can be written, and there are one core and 768 MB."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from child import Child

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "65534"
# Python and the packages may be below a home that only their owner enters: reading is permitted.
CAPABILITIES = "-all,+dac_read_search"


def unprivileged() -> list[str]:
    """What makes a command run as nobody."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("only root, with setpriv, can start a process of another user")
    command = [setpriv, "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
    command += [f"--inh-caps={CAPABILITIES}", f"--ambient-caps={CAPABILITIES}"]
    if subprocess.run([*command, sys.executable, "-c", ""], capture_output=True).returncode:
        pytest.skip("processes may not change their user on this machine")
    return command


def harden() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    resource.setrlimit(resource.RLIMIT_DATA, (768 << 20, 768 << 20))


@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="sets Linux's resource limits")
@pytest.mark.slow
def test_a_hardened_server_starts_and_answers(tmp_path):
    serve = ["-m", "gptmanager", "serve", "--model", ROOT / "examples/tiny_llama", "--port", "0"]
    serve += ["--dtype", "float64"]  # nothing is kept, and of the kernels it needs only one
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    with Child(
        [*unprivileged(), sys.executable, *serve],
        cwd="/",
        env={**environment, "NUMBA_OPT": "0"},  # compiles in half the time
        preexec_fn=harden,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "http://" in line:
                break
        try:
            assert "http://" in lines[-1], "".join(lines)
            body = {"prompt": "17 + 25 =", "max_tokens": 4, "temperature": 0}
            url = lines[-1].split()[-1] + "/v1/completions"
            assert httpx.post(url, json=body, timeout=60).json()["choices"][0]["text"] == " 42"
        finally:
            process.terminate()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 0
    warnings = [line for line in lines if "compiled kernels" in line]
    assert len(warnings) == 1 and "NUMBA_CACHE_DIR" in warnings[0]
    assert "compiling kernels for this processor" in "".join(lines)
