"""Limits of control groups, on faked /proc and /sys: both versions, nested, in containers."""

import math

import pytest
import torch

from gptmanager.environment.machine import cores, memory
from gptmanager.environment.machine.control_groups import cpu_quota, memory_left
from gptmanager.environment.machine.cores import num_cores
from gptmanager.kernels.simd import threads

GIB = 1 << 30
V2 = "25 20 0:22 {within} {where} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "30 20 0:26 {within} {where} rw shared:5 - cgroup cgroup rw,{controllers}\n"


class Machine:
    """A root folder with the files of one process."""

    def __init__(self, root):
        self.root = root
        self.write("proc/self/mountinfo", "20 1 8:1 / / rw - ext4 /dev/sda rw\n")

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def v2(self, path, within="/", where="/sys/fs/cgroup"):
        self.write("proc/self/cgroup", f"0::{path}\n")
        self.write(
            "proc/self/mountinfo", V2.format(within=within, where=where.replace(" ", "\\040"))
        )
        return self

    def v1(self, controllers, path, within="/"):
        self.write("proc/self/cgroup", f"4:{controllers}:{path}\n")
        where = f"/sys/fs/cgroup/{controllers}"
        self.write(
            "proc/self/mountinfo", V1.format(within=within, where=where, controllers=controllers)
        )
        return self

    def group(self, path, **files):
        """Files of a group by their names, with `__` for a dot."""
        for name, text in files.items():
            self.write(f"sys/fs/cgroup{path}/{name.replace('__', '.')}", f"{text}\n")
        return self


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def used_v2(limit, used, files=0, **more):
    stat = f"anon 5\nactive_file {files}\ninactive_file {files}"
    return {"memory__max": limit, "memory__current": used, "memory__stat": stat, **more}


def used_v1(limit, used, files=0):
    stat = f"cache 7\ntotal_active_file {files}\ntotal_inactive_file {files}"
    return {
        "memory__limit_in_bytes": limit,
        "memory__usage_in_bytes": used,
        "memory__stat": stat,
    }


def test_no_control_groups(machine):
    assert cpu_quota(machine.root) == memory_left(machine.root) == math.inf
    assert cpu_quota(machine.root / "nothing") == memory_left(machine.root / "nothing") == math.inf


def test_a_container_with_groups_of_the_second_version(machine):
    machine.v2("/").group("", cpu__max="150000 100000", **used_v2(4 * GIB, GIB, GIB // 4))
    assert cpu_quota(machine.root) == 1.5
    assert memory_left(machine.root) == 3.5 * GIB


def test_groups_above_count_too(machine):
    """Systemd nests slices and services, and the topmost group has no limits."""
    machine.v2("/user.slice/app.slice/app.service")
    machine.group("/user.slice", cpu__max="400000 100000", **used_v2("max", 9 * GIB))
    machine.group("/user.slice/app.slice", cpu__max="100000 50000", **used_v2(8 * GIB, 7 * GIB))
    machine.group("/user.slice/app.slice/app.service", cpu__max="max 100000", **used_v2(4 * GIB, 1))
    assert cpu_quota(machine.root) == 2
    assert memory_left(machine.root) == GIB


def test_the_limit_above_which_memory_is_reclaimed_counts(machine):
    machine.v2("/s").group("/s", **used_v2("max", GIB, memory__high=3 * GIB))
    assert memory_left(machine.root) == 2 * GIB


def test_groups_of_the_first_version(machine):
    machine.v1("cpu,cpuacct", "/docker/abc").v1("memory", "/docker/abc")
    machine.group("/cpu,cpuacct", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    machine.group("/cpu,cpuacct/docker", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    machine.group("/cpu,cpuacct/docker/abc", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    machine.group("/memory", **used_v1(9223372036854771712, 60 * GIB))
    machine.group("/memory/docker", **used_v1(6 * GIB, 5 * GIB, GIB // 2))
    machine.group("/memory/docker/abc", **used_v1(3 * GIB, GIB // 2))
    assert cpu_quota(machine.root) == 2.5
    assert memory_left(machine.root) == 2 * GIB


def test_a_container_sees_its_own_group_at_the_mount_point(machine):
    """The path is the machine's, but only what is below it is mounted."""
    machine.v1("cpu", "/docker/abc", within="/docker/abc")
    machine.group("/cpu", cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    machine.v2("/kubepods/pod1/c", within="/kubepods/pod1")
    machine.group("", **used_v2(2 * GIB, GIB)).group("/c", **used_v2(9 * GIB, GIB))
    assert cpu_quota(machine.root) == 0.5
    assert memory_left(machine.root) == GIB


@pytest.mark.parametrize("path", ["/of/another/namespace", "/../../outside", "/gone"])
def test_a_path_that_is_not_mounted(machine, path):
    machine.v2(path, within="/mine" if "another" in path else "/")
    machine.group("", cpu__max="300000 100000")
    assert cpu_quota(machine.root) == 3


def test_a_mount_point_with_a_space(machine):
    machine.v2("/", where="/sys/fs/cgroup/a b").group("/a b", cpu__max="200000 100000")
    assert cpu_quota(machine.root) == 2


def test_both_versions_at_once(machine):
    """In systemd's hybrid mode, the second version has no controllers."""
    machine.write("proc/self/cgroup", "1:name=systemd:/init\n")
    machine.v2("/init", where="/sys/fs/cgroup/unified").v1("cpu,cpuacct", "/init")
    machine.group("/cpu,cpuacct/init", cpu__cfs_quota_us=100000, cpu__cfs_period_us=100000)
    assert cpu_quota(machine.root) == 1


@pytest.mark.parametrize("text", ["", "max", "many 100000", "100000", "0 0", "100000 0", "\0"])
def test_files_that_say_nothing(machine, text):
    machine.v2("/").group("", cpu__max=text, memory__max=text, memory__current=text)
    assert cpu_quota(machine.root) == memory_left(machine.root) == math.inf


def test_more_memory_in_use_than_allowed(machine):
    machine.v2("/").group("", **used_v2(GIB, 2 * GIB))
    assert memory_left(machine.root) == 0


@pytest.mark.parametrize(
    ("quota", "schedulable", "count"),
    [("50000", 8, 1), ("100000", 8, 1), ("190000", 8, 1), ("400000", 8, 4), ("max", 8, 8)]
    + [("400000", 2, 2)],
)
def test_cores_within_a_quota(machine, monkeypatch, quota, schedulable, count):
    monkeypatch.setattr(cores, "num_schedulable", lambda: schedulable)
    machine.v2("/").group("", cpu__max=f"{quota} 100000")
    assert num_cores(machine.root) == count


def test_cores_of_this_process(monkeypatch):
    monkeypatch.setattr(cores.os, "sched_getaffinity", {0: {1, 3, 5}, 1: {2}}.__getitem__)
    assert cores.num_schedulable() == 3


def test_free_memory_is_within_the_limit(monkeypatch):
    monkeypatch.setattr(memory, "memory_left", lambda: 5.0)
    assert memory.free_memory_bytes() == 5
    monkeypatch.setattr(memory, "memory_left", lambda: math.inf)
    assert 0 < memory.free_memory_bytes() < math.inf


@pytest.mark.parametrize("name", ["SC_AVPHYS_PAGES", "SC_PHYS_PAGES"])
def test_free_memory_where_there_is_no_proc(monkeypatch, name):
    monkeypatch.setattr(memory, "open", lambda path, **_: open("/nowhere"), raising=False)
    monkeypatch.setattr(memory.os, "sysconf_names", [name])
    monkeypatch.setattr(memory.os, "sysconf", {name: 7, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert memory._free_in_system() == 7 * 4096


@pytest.mark.parametrize(
    ("cores", "default", "given", "told", "left"),
    [
        *[(1, 4, 4, None, 1), (3, 4, 4, None, 3), (4, 4, 4, None, 4), (8, 4, 4, None, 4)],
        *[(1, 4, 3, None, 3), (1, 4, 4, "4", 4)],  # the host, or the environment, has set it
    ],
)
def test_the_default_number_of_threads_is_within_the_quota(
    monkeypatch, cores, default, given, told, left
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    monkeypatch.setattr(threads, "num_cores", lambda: cores)
    monkeypatch.setattr(threads, "DEFAULT_SIZE", default)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(given)
        threads.keep_within_quota()
        assert torch.get_num_threads() == left
    finally:
        torch.set_num_threads(before)
