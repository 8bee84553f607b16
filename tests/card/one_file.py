"""Runs the GPU tests of one file, each once, in as many processes as it takes.

    python tests/card/one_file.py tests/cuda/test_norms.py --outcomes FILE

A test that hangs, or breaks the device's context, ends its process. The next process goes on with
the tests behind it. Outcomes are kept in a file, so that a run that was killed goes on as well.
Exit status: 0 all passed, 1 some failed or ended their process, 2 tests could not be run at all.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from outcomes import Outcomes

MOST_PROCESSES = 6
TEST_S, SLOW_S = 60, 0  # until a test counts as hanging; 0: never
NO_TESTS = 5  # pytest's exit status
# Plugins that happen to be installed cost each process seconds.
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    status = 0
    for _ in range(MOST_PROCESSES):
        before = Outcomes.read(options.outcomes)
        path = os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)))
        own = {**ENVIRONMENT, "PYTHONPATH": path, "CARD_OUTCOMES": str(options.outcomes)}
        environment = {**os.environ, **own}
        status = subprocess.run(
            [*shlex.split(options.under), *pytest_command(options)], env=environment, check=False
        ).returncode
        after = Outcomes.read(options.outcomes)
        if after.has_ended or after == before:  # or nothing could be run
            break
    found = Outcomes.read(options.outcomes)
    print(f"{options.file}: {found.text}")
    if not found.has_ended and not found.started:
        return 2
    return int(bool(found.failed or found.lost or status not in (0, 1, NO_TESTS)))


def pytest_command(options: argparse.Namespace) -> list[str]:
    """What the file's settings would refuse on a machine with other versions is left out of them:
    warnings are no errors, and options of plugins that are not installed are not given.
    """
    command = [sys.executable, "-m", "pytest", options.file, "-m", "gpu", "-q", "-rfE"]
    command += ["-p", "outcomes", "-p", "no:cacheprovider", "-W", "default", "-o", "addopts="]
    if find_spec("pytest_timeout") is not None:
        seconds = SLOW_S if options.slow else TEST_S
        command += ["-p", "pytest_timeout", f"--timeout={seconds}", "--timeout-method=thread"]
    return command


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--outcomes", type=Path, required=True, help="where outcomes are kept")
    parser.add_argument("--under", default="", help="a command that pytest runs under")
    parser.add_argument("--slow", action="store_true", help="no test counts as hanging")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
