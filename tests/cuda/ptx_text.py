"""The PTX that NVRTC makes of kernels."""

from __future__ import annotations

from collections.abc import Sequence

from requirements import skip

from gptmanager.cuda.device import compiler
from gptmanager.cuda.device.launch import Program
from gptmanager.errors import ConfigError


def ptx_of(program: Program, names: Sequence[str], arch: str, options: Sequence[str] = ()) -> str:
    """Return the PTX of the kernels `names` for `arch`, such as `compute_90a`.

    Without NVRTC the test is skipped.
    """
    try:
        nvrtc = compiler.find_nvrtc()
    except ConfigError as error:
        skip(str(error))
    made = nvrtc.createProgram(program.path.read_text("utf-8"), program.file, (), ())
    try:
        for name in names:
            nvrtc.addNameExpression(made, name)
        folders = (f"-I{compiler.FOLDER}", *compiler._cuda_includes())
        nvrtc.compileProgram(made, ("-std=c++17", f"-arch={arch}", *options, *folders))
        return nvrtc.getPTX(made).decode()
    finally:
        nvrtc.destroyProgram(made)
