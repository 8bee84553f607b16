"""Run CUDA C++ kernels on a CPU: g++ compiles them, and their threads run one after another.

module = emulator.Module(source=text, name_expressions=["scale"], check=True)
x = emulator.asarray(np.ones(100, np.float32))
module.get_function("scale")((1,), (128,), (x, np.int32(100)))
"""

from gptmanager.cuda.emulator.arrays import asarray, asnumpy, empty
from gptmanager.cuda.emulator.raw_module import Kernel, Module
from gptmanager.cuda.emulator.reports import EmulatorError
from gptmanager.cuda.emulator.toolchain import Toolchain

__all__ = ["EmulatorError", "Kernel", "Module", "Toolchain", "asarray", "asnumpy", "empty"]
