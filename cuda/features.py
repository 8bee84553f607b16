"""`Features`: switches for parts of the CUDA code, to find out which part causes an error.

The environment variable `GPTMANAGER_CUDA` sets the switches. Each launcher reads the variable once,
when the launcher is created, and keeps the `Features` for the code that chooses and launches
kernels.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from gptmanager.errors import ConfigError, quoted

VARIABLE = "GPTMANAGER_CUDA"


@dataclass(frozen=True, slots=True)
class Features:
    """The parts of the CUDA code that are in use.

    In the environment variable, `no-NAME` switches off a part that is on by default, and `NAME`
    switches on a part that is off by default. NAME is a field with "-" in place of "_".
    """

    early: bool = True  # kernels begin while the previous one ends (programmatic dependent launch)
    warpgroups: bool = True  # attention by `wgmma`
    products: bool = True  # matmuls by our kernels; without it torch computes all matmuls
    tiled: bool = True  # matmuls of more than 16 rows by our kernels
    graphs: bool = True  # steps may be captured as CUDA graphs
    mixed_graphs: bool = True  # steps with contexts may be captured too
    split: bool = True  # several thread blocks may share a row of generation attention
    async_copies: bool = True  # `cp.async` copies tiles to shared memory while the kernel computes
    pinned: bool = True  # copies from and to the device use pinned memory
    carveout: bool = False  # kernels with dynamic shared memory get the largest share of L1 for it
    extra_syncwarp: bool = False  # kernels call `__syncwarp` before instructions for a whole warp

    @classmethod
    def parse(cls, text: str) -> Features:
        """Parse words separated by commas. Raises ConfigError for an unknown word."""
        known = _words()
        given = [word.strip() for word in text.split(",") if word.strip()]
        unknown = [word for word in given if word not in known]
        if unknown:
            raise ConfigError(
                f"unknown word {quoted(unknown[0])} in {VARIABLE}; allowed are {', '.join(known)}"
            )
        return replace(cls(), **dict(map(known.__getitem__, given)))

    @classmethod
    def asked(cls, environment: Mapping[str, str] = os.environ) -> Features:
        """Return the features that the environment variable selects, or the defaults if unset."""
        return cls.parse(environment.get(VARIABLE, ""))

    @property
    def words(self) -> tuple[str, ...]:
        """The words, as in the environment variable, for all fields that are not the default."""
        return tuple(
            word for word, (name, value) in _words().items() if getattr(self, name) is value
        )

    @property
    def compiler_options(self) -> tuple[str, ...]:
        """Options for compiling kernels, valid for NVRTC and for the emulator's compiler."""
        copies = () if self.async_copies else ("-DCOPIES_AT_ONCE",)
        return (*copies, "-DEXTRA_SYNCWARP") if self.extra_syncwarp else copies


def _words() -> dict[str, tuple[str, bool]]:
    """Return a dict from each word to the field that it sets and the field's value."""
    return {
        ("no-" if one.default else "") + one.name.replace("_", "-"): (one.name, not one.default)
        for one in fields(Features)
    }
