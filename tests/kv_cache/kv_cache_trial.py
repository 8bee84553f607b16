"""Many random operations on KV caches, proved after each: how many, and of which kind.

python tests/kv_cache/kv_cache_trial.py --operations 1000000
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence

from kv_cache_model import Divergence
from kv_cache_operations import Trial, random_options

from gptmanager.kv_cache import LedgerError

_EPISODE = 1000  # operations on one KV cache


def run_episode(seed: int, number: int) -> Counter[str]:
    """About a thousand operations on one KV cache, to its end; how many of which kind.

    Raises Divergence, or what the KV cache itself raises, with a note that tells how to repeat it.
    """
    chance = random.Random(f"{seed} {number}")
    options = random_options(chance)
    trial = Trial(options, chance)
    try:
        while trial.operations.total() < _EPISODE:
            trial.operate()
        trial.end()
    except (Divergence, LedgerError) as error:
        raise Divergence(
            f"episode {number} of seed {seed}, operation {trial.operations.total()}, {options}: "
            f"{error}"
        ) from error
    return trial.operations


def run_trial(operations: int, seed: int = 0) -> Counter[str]:
    """At least so many operations; how many of which kind there were."""
    done: Counter[str] = Counter()
    number = 0
    while done.total() < operations:
        done += run_episode(seed, number)
        number += 1
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Random operations on KV caches beside a plain model, check() after each.",
    )
    parser.add_argument("--operations", type=int, default=1_000_000, help="how many at least")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other operations")
    parser.add_argument("--episode", type=int, help="one of those that --seed names, alone")
    given = parser.parse_args(arguments)
    try:
        if given.episode is not None:
            done = run_episode(given.seed, given.episode)
        else:
            done = run_trial(given.operations, given.seed)
    except Divergence as divergence:
        print(divergence, file=sys.stderr)
        return 1
    for kind, count in sorted(done.items()):
        print(f"{count:>9,}  {kind}")
    print(f"{done.total():>9,}  operations, check() after each: 0 divergences, 0 leaks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
