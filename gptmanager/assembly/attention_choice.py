"""Chooses between our own attention and attention of providers, for each phase."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gptmanager.assembly.attention_trial import (
    GENERATION,
    OWN,
    PHASES,
    AttentionTrial,
    Seconds,
    StepLimits,
    fastest,
)
from gptmanager.kernels.attention.attention_arguments import AttentionShape
from gptmanager.kernels.provided import ProvidedKernels, Served
from gptmanager.kernels.providers import AttentionProvider, answer_of, is_capturable, name_of
from gptmanager.lifecycle.log import logger

Agree = Callable[[Sequence[str]], Sequence[str]]


class _Able(NamedTuple):
    """A provider, and the shapes that it does not refuse."""

    provider: AttentionProvider
    shapes: frozenset[AttentionShape]


def choose(
    kernels: ProvidedKernels,
    providers: Sequence[AttentionProvider],
    shapes: Sequence[AttentionShape],
    dtype: torch.dtype,
    limits: StepLimits,
    seconds: Seconds | None = None,
    agree: Agree = lambda names: names,
    device: torch.device | str = "cpu",
) -> None:
    """Choose the attention of `kernels` for each phase, and log which shapes providers refuse.

    Without `seconds`, `providers` has one provider, which is used for the shapes that it accepts.
    With `seconds`, all providers and our own kernels are timed, and the fastest is used in each
    phase; but if steps with contexts are captured, our own kernels are used without a trial.
    `agree` receives the name that this rank chose for each phase. For each phase it returns the
    same name, or "own" if another rank chose another name.
    """
    able = {
        name_of(it): _Able(it, _accepted(it, shapes, dtype, limits.tokens_per_block))
        for it in providers
    }
    one = np.array([0, 1], dtype=np.int32), np.ones(1, dtype=np.int32)
    if limits.captures and not kernels.plan(shapes, *one, 0, fixed=1):
        limits = limits._replace(captures=False, captures_mixed=False)
    if seconds is None:
        names: Sequence[str] = [name for name in able for _ in PHASES]
    elif limits.captures_mixed:
        names = agree((OWN, OWN))  # ranks that do not capture such steps wait for this
        logger.info("attention: our own kernels, because steps with contexts are captured too")
    else:
        trial = AttentionTrial(kernels, dtype, limits, seconds, device)
        names = agree([_fastest(trial, phase, able, shapes, limits) for phase in PHASES])
        logger.info("attention: context by %s, generation by %s", *names)
    chosen = [able.get(name) for name in names]
    kernels.use_attention(
        {
            shape: Served(*(it.provider if it and shape in it.shapes else None for it in chosen))
            for shape in shapes
        }
    )
    generation = chosen[PHASES.index(GENERATION)]
    if limits.captures and generation and generation.shapes:
        if not is_capturable(generation.provider):
            logger.warning(
                "generation steps are launched op by op, without CUDA graphs: the attention "
                "provider %s is not capturable",
                name_of(generation.provider),
            )


def _accepted(
    provider: AttentionProvider,
    shapes: Sequence[AttentionShape],
    dtype: torch.dtype,
    tokens_per_block: int,
) -> frozenset[AttentionShape]:
    """Return the shapes that a provider does not refuse, and log each reason of a refusal once."""
    kinds = (str, type(None)), "None or a string"
    reasons: dict[AttentionShape, str | None] = {
        it: answer_of(provider, "refusal", (it, dtype, tokens_per_block), *kinds) for it in shapes
    }
    for reason in dict.fromkeys(it for it in reasons.values() if it is not None):
        logger.warning(
            "our own kernels compute attention in place of the provider %s, in %d of %d kinds of "
            "layers: %s",
            *(name_of(provider), [*reasons.values()].count(reason), len(shapes), reason),
        )
    return frozenset(shape for shape, reason in reasons.items() if reason is None)


def _fastest(
    trial: AttentionTrial,
    phase: str,
    able: Mapping[str, _Able],
    shapes: Sequence[AttentionShape],
    limits: StepLimits,
) -> str:
    """Return the name of the fastest provider over all shapes, or "own" for our own kernels.

    If generation steps are to be captured, only capturable providers may be chosen for them.
    """
    keeps_all = phase != GENERATION or not limits.captures
    used = {
        name: it for name, it in able.items() if it.shapes and (keeps_all or is_capturable(it[0]))
    }
    totals = dict.fromkeys((OWN, *used), 0.0)
    for shape in shapes if used else ():
        asked = {name: it.provider for name, it in used.items() if shape in it.shapes}
        found = trial.seconds_of(phase, shape, asked)
        for name in totals:
            missing = math.inf if name in asked else found[OWN]
            totals[name] += found.get(name, missing)
    return fastest(totals)
