"""`Features`: parts of the CUDA code that can be switched off, to find which of them is at fault.

The environment variable `GPTMANAGER_CUDA` names them. Each launcher reads it once, when it is made,
and carries the value to whatever decides about a kernel or a launch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from gptmanager.errors import ConfigError

VARIABLE = "GPTMANAGER_CUDA"


@dataclass(frozen=True, slots=True)
class Features:
    """The parts of the CUDA code that are in use.

    `no-NAME` switches off a part that is on by default, `NAME` switches on one that is off.

    `early`: a kernel begins while the one before it ends. `warpgroups`: attention by `wgmma`.
    `products`: matmuls by our kernels, otherwise all by torch. `tiled`: those of more than 16 rows.
    `graphs`: generation steps are recorded as CUDA graphs. `split`: several blocks share a row of
    generation attention. `async_copies`: tiles come to shared memory by `cp.async` while the kernel
    computes. `pinned`: copies from and to the device use pinned memory. `carveout`: kernels that
    ask for much shared memory ask for the largest share of the L1 cache for it.
    """

    early: bool = True
    warpgroups: bool = True
    products: bool = True
    tiled: bool = True
    graphs: bool = True
    split: bool = True
    async_copies: bool = True
    pinned: bool = True
    carveout: bool = False

    @classmethod
    def parse(cls, text: str) -> Features:
        """Return the features that words separated by commas leave. ConfigError for other words."""
        known = _words()
        given = [word.strip() for word in text.split(",") if word.strip()]
        unknown = [word for word in given if word not in known]
        if unknown:
            raise ConfigError(
                f"{VARIABLE} has the unknown word {unknown[0]!r}; the words are {', '.join(known)}"
            )
        return replace(cls(), **dict(map(known.__getitem__, given)))

    @classmethod
    def asked(cls, environment: Mapping[str, str] = os.environ) -> Features:
        """Return the features that the environment variable asks for; all of them without it."""
        return cls.parse(environment.get(VARIABLE, ""))

    @property
    def words(self) -> tuple[str, ...]:
        """The words that differ from the default, as the environment variable has them."""
        return tuple(
            word for word, (name, value) in _words().items() if getattr(self, name) is value
        )

    @property
    def compiler_options(self) -> tuple[str, ...]:
        """Return the compiler's options for kernels, for NVRTC and for the emulator's compiler."""
        return () if self.async_copies else ("-DCOPIES_AT_ONCE",)


def _words() -> dict[str, tuple[str, bool]]:
    """Each word, with the field that it sets and the value."""
    return {
        ("no-" if field.default else "") + field.name.replace("_", "-"): (
            field.name,
            not field.default,
        )
        for field in fields(Features)
    }
