"""Memory, processors and disks, as the kernel's files say it, with what control groups leave of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.machine.host import (
    CgroupLimits,
    batch_system,
    count_cores,
    read_disk,
    read_limits,
    read_memory,
    read_processors,
    shared_memory_bytes,
)

GIB = 1 << 30
NO_LIMIT = CgroupLimits(None, None, None)
MEMINFO = """\
MemTotal:       65843260 kB
MemFree:         1000000 kB
MemAvailable:   50000000 kB
SwapTotal:       2097148 kB
"""


def write(root: Path, **files: str) -> Path:
    """Files below a root; "__" stands for a slash, "_D_" for a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_D_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_counts_every_group_up_to_the_root(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="0::/pods/one\n",
        sys__fs__cgroup__pods__memory_D_max=f"{8 * GIB}\n",
        sys__fs__cgroup__pods__memory_D_current=f"{6 * GIB}\n",
        sys__fs__cgroup__pods__memory_D_stat=f"anon {5 * GIB}\ninactive_file {1 * GIB}\n",
        sys__fs__cgroup__pods__cpu_D_max="400000 100000\n",
        sys__fs__cgroup__pods__one__memory_D_max="max\n",
        sys__fs__cgroup__pods__one__memory_D_current="1024\n",
        sys__fs__cgroup__pods__one__cpu_D_max="max 100000\n",
    )
    assert read_limits(tmp_path) == CgroupLimits(8 * GIB, 3 * GIB, 4.0)


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="9:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n1:name=systemd:/docker/ab\n",
        sys__fs__cgroup__memory__docker__ab__memory_D_limit_in_bytes=f"{4 * GIB}\n",
        sys__fs__cgroup__memory__docker__ab__memory_D_usage_in_bytes=f"{1 * GIB}\n",
        sys__fs__cgroup__memory__docker__ab__memory_D_stat="total_inactive_file 0\n",
        sys__fs__cgroup__memory__memory_D_limit_in_bytes="9223372036854771712\n",
    )
    write(
        tmp_path / "sys/fs/cgroup/cpu,cpuacct/docker/ab",
        cpu_D_cfs_quota_us="150000\n",
        cpu_D_cfs_period_us="100000\n",
    )
    assert read_limits(tmp_path) == CgroupLimits(4 * GIB, 3 * GIB, 1.5)


def test_inside_a_container_its_own_group_is_the_root_that_is_mounted(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="4:memory:/docker/not-mounted-here\n2:cpu:/docker/not-mounted-here\n",
        sys__fs__cgroup__memory__memory_D_limit_in_bytes=f"{2 * GIB}\n",
        sys__fs__cgroup__cpu__cpu_D_cfs_quota_us="-1\n",
        sys__fs__cgroup__cpu__cpu_D_cfs_period_us="100000\n",
    )
    assert read_limits(tmp_path) == CgroupLimits(2 * GIB, 2 * GIB, None)


@pytest.mark.parametrize("text", ["", "0::/\n"], ids=["no cgroups", "root"])
def test_no_limits(tmp_path: Path, text: str) -> None:
    assert read_limits(write(tmp_path, proc__self__cgroup=text)) == NO_LIMIT


def test_memory_of_a_machine(tmp_path: Path) -> None:
    found = read_memory(NO_LIMIT, write(tmp_path, proc__meminfo=MEMINFO))
    assert (found.total_bytes, found.available_bytes, found.limit_bytes) == (
        65843260 << 10,
        50000000 << 10,
        None,
    )
    assert found.swap_bytes == 2097148 << 10


def test_memory_of_a_container_is_what_its_limit_leaves(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO)
    found = read_memory(CgroupLimits(8 * GIB, 3 * GIB, None), tmp_path)
    assert (found.total_bytes, found.available_bytes, found.limit_bytes) == (8 * GIB, 3 * GIB, 8 * GIB)
    above = read_memory(CgroupLimits(1 << 50, 1 << 50, None), tmp_path)
    assert (above.total_bytes, above.available_bytes, above.limit_bytes) == (
        65843260 << 10,
        50000000 << 10,
        None,
    )


def test_threads_of_one_core_are_one_slot(tmp_path: Path) -> None:
    for thread, core in ((0, 0), (1, 1), (2, 0), (3, 1)):
        topology = f"sys/devices/system/cpu/cpu{thread}/topology"
        write(tmp_path / topology, physical_package_id="0\n", core_id=f"{core}\n")
    assert count_cores({0, 1, 2, 3}, tmp_path) == 2
    assert count_cores({0, 2}, tmp_path) == 1
    assert count_cores({0, 9}, tmp_path) == 2, "of 9 the kernel says nothing"
    assert count_cores(set(), tmp_path) == 1


def test_this_machine() -> None:
    memory, processors = read_memory(), read_processors()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert 1 <= processors.cores <= processors.threads
    assert (shared_memory_bytes() or 0) > 0


def test_a_disk_is_that_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    there, not_yet = read_disk(tmp_path), read_disk(tmp_path / "store" / "deep")
    assert not_yet.device == there.device == tmp_path.stat().st_dev
    assert not_yet.writable
    assert 0 < not_yet.free_bytes <= not_yet.total_bytes
    assert not_yet.folder == str(tmp_path / "store" / "deep")


def test_kind_and_quotas_are_those_of_the_longest_mount(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "store"
    folder.mkdir(parents=True)
    mounts = (
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        f"23 22 0:50 / {tmp_path} rw - nfs4 server:/export rw,vers=4.2\n"
        f"24 23 8:2 / {tmp_path}/data rw,noatime shared:1 - xfs /dev/sdb1 rw,attr2,prjquota\n"
    )
    write(tmp_path / "root", proc__self__mountinfo=mounts)
    assert (read_disk(folder, tmp_path / "root").kind, read_disk(folder, tmp_path / "root").quota) == (
        "xfs",
        True,
    )
    above = read_disk(tmp_path, tmp_path / "root")
    assert (above.kind, above.network, above.quota) == ("nfs4", True, False)


def test_a_kernel_that_says_nothing_leaves_the_kind_open(tmp_path: Path) -> None:
    assert read_disk(tmp_path, tmp_path / "nothing").kind == ""


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"SLURM_JOB_ID": "7"}, "Slurm"),
        ({"PBS_JOBID": "7.host"}, "PBS"),
        ({"SLURM_JOB_ID": ""}, None),
        ({}, None),
    ],
)
def test_jobs_of_batch_systems(environment: dict[str, str], name: str | None) -> None:
    assert batch_system(environment) == name


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu avx2 amx_bf16\nbugs\t\t:\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", False),
        ("flags\t\t: fpu avx2 avx_vnni avx_vnni_int8 avx_ne_convert\n", True),
        ("Features\t: fp asimd bf16\n", None),
    ],
)
def test_whether_the_processor_has_bf16(cpuinfo: str, has: bool | None, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
    assert read_processors(root=tmp_path).bf16 is has
