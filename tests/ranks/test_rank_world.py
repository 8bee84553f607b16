"""Which rank a process is: from the environment that launchers set, each mistake by its name."""

from __future__ import annotations

import pytest
from rank_links import at_once
from ranks_by_hand import free_port

from gptmanager import ParallelConfig
from gptmanager.errors import ConfigError
from gptmanager.ranks import world as world_module
from gptmanager.ranks.layout import RankLayout
from gptmanager.ranks.world import World, find_world

WHERE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def world(config, **environment):
    return find_world(config, environment)


@pytest.mark.parametrize(
    ("rank", "size"),
    [
        ("RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ],
)
def test_launchers_set_the_rank(rank, size):
    found = world(ParallelConfig(2, 3), **WHERE, **{rank: "4", size: "6"})
    assert found.layout == RankLayout(4, 2, 3) and found.host == "10.0.0.1" and found.group is None


def test_torchruns_numbers_come_before_those_of_mpi():
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "9"}
    assert world(ParallelConfig(2), **WHERE, **mpi, RANK="1", WORLD_SIZE="2").layout.rank == 1


def test_without_ranks_the_environment_says_nothing():
    assert world(None, RANK="3", WORLD_SIZE="8").layout == RankLayout()


def test_one_rank_needs_no_environment():
    assert world(ParallelConfig()).layout == RankLayout()
    assert world(ParallelConfig(), RANK="0", WORLD_SIZE="1").layout == RankLayout()


@pytest.mark.parametrize(
    ("config", "environment", "text"),
    [
        (ParallelConfig(2), {}, "RANK is not set: start one process per rank with torchrun"),
        (ParallelConfig(2), {"RANK": "1"}, "WORLD_SIZE is not set"),
        (
            ParallelConfig(2),
            {"RANK": "one", "WORLD_SIZE": "2"},
            "RANK must be an integer, got 'one'",
        ),
        (
            ParallelConfig(2),
            {"RANK": "0", "WORLD_SIZE": "2.0"},
            "WORLD_SIZE must be an integer, got '2.0'",
        ),
        (
            ParallelConfig(2, 2),
            {"RANK": "0", "WORLD_SIZE": "2"},
            "pipeline_parallel_size = 2 need 4 ranks, but WORLD_SIZE has 2",
        ),
        (ParallelConfig(), {"RANK": "0", "WORLD_SIZE": "2"}, "need 1 ranks, but WORLD_SIZE has 2"),
        (ParallelConfig(2), {"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 must be from 0 to 1"),
        (ParallelConfig(2), {"RANK": "-1", "WORLD_SIZE": "2"}, "RANK = -1 must be from 0 to 1"),
        (ParallelConfig(2), {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        (
            ParallelConfig(2),
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": ""},
            "MASTER_PORT is not set",
        ),
    ],
)
def test_what_the_environment_lacks_is_named(config, environment, text):
    with pytest.raises(ConfigError, match=text):
        world(config, **environment)


@pytest.mark.parametrize("launcher", ["OMPI_COMM_WORLD", "PMI"])
@pytest.mark.parametrize(
    ("config", "rank", "size", "text"),
    [
        (ParallelConfig(2), "one", "2", "LAUNCHER_RANK must be an integer, got 'one'"),
        (ParallelConfig(2), "0", "", "LAUNCHER_SIZE must be an integer, got ''"),
        (ParallelConfig(2), "0", "3", "need 2 ranks, but LAUNCHER_SIZE has 3"),
        (ParallelConfig(2), "2", "2", "LAUNCHER_RANK = 2 must be from 0 to 1: LAUNCHER_SIZE is 2"),
    ],
)
def test_an_error_names_the_variable_of_the_launcher(launcher, config, rank, size, text):
    given = {f"{launcher}_RANK": rank, f"{launcher}_SIZE": size}
    with pytest.raises(ConfigError, match=text.replace("LAUNCHER", launcher)):
        world(config, **WHERE, **given)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_every_part_of_every_stage_is_one_ranks(parts, stages):
    layouts = [RankLayout(rank, parts, stages) for rank in range(parts * stages)]
    assert {(it.stage, it.part) for it in layouts} == {
        (stage, part) for stage in range(stages) for part in range(parts)
    }
    assert layouts[0].is_last_stage and layouts[0].part == 0
    for layout in layouts:
        assert layout.rank in layout.stage_ranks and len(layout.stage_ranks) == parts


def test_managers_one_after_another_have_the_same_store(monkeypatch):
    """Rank 0's process may be quicker to leave one, and rank 1's to begin the next."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world_module, "_stores", {})

    def managers(rank):
        found = []
        for number in range(8):
            store = World(RankLayout(rank, 2, 1), "127.0.0.1").store(5.0)
            if rank == 0:
                store.set("said", str(number))
            found.append(int(store.get("said")))
        return found

    assert at_once(managers, range(2)) == [[*range(8)]] * 2
