"""Which disk is under a path: this machine's, and machines made of files as the kernel shows them."""

import os
from pathlib import Path

import pytest

from edgemoe.errors import UserError
from edgemoe.machine import disk
from edgemoe.machine.disk import check_same_disk, disk_of


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sysfs and a mount table to fill: the device number of every file is that of `tmp_path`."""
    monkeypatch.setattr(disk, "SYS", tmp_path / "sys")
    monkeypatch.setattr(disk, "MOUNTS", tmp_path / "mountinfo")
    mount(tmp_path, "/", "ext4", "/dev/root")
    (tmp_path / "sys" / "dev" / "block").mkdir(parents=True)
    return tmp_path


def mount(machine: Path, point: str, filesystem: str, source: str) -> None:
    with (machine / "mountinfo").open("a") as table:
        table.write(f"22 1 8:1 / {point} rw,relatime shared:1 - {filesystem} {source} rw\n")


def device(machine: Path, name: str, link: bool = True, **files: str) -> Path:
    """A block device's folder; with `link`, the one that holds `tmp_path`."""
    folder = machine / "sys" / "devices" / name
    for path, text in {"size": "1000", **files}.items():
        file = folder / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    if link:
        number = machine.stat().st_dev
        (machine / "sys" / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "files", "kind", "in_label"),
    [
        ("nvme0n1", {"queue__rotational": "0", "device__model": "Samsung 990 PRO"}, "SSD", "Samsung 990 PRO"),
        ("sda", {"queue__rotational": "1", "device__model": "ST4000"}, "hard disk", "ST4000"),
        ("vda", {"queue__rotational": "1", "serial": "x"}, "virtual disk", "host may cache"),
        ("sdb", {"queue__rotational": "0", "device__vendor": "QEMU"}, "virtual disk", "host may cache"),
        ("nvme1n1", {"device__model": "Amazon Elastic Block Store"}, "virtual disk", "host may cache"),
    ],
)
def test_what_a_disk_is_called(machine: Path, name: str, files: dict[str, str], kind: str, in_label: str) -> None:
    device(machine, name, **files)
    found = disk_of(machine)
    assert (found.kind, found.caches, found.filesystem, found.block_device) == (kind, None, "ext4", True)
    assert in_label in found.label and name in found.label


def test_a_partition_and_an_encrypted_mapping_are_their_disk(machine: Path) -> None:
    whole = device(machine, "nvme0n1", link=False, wwid="eui.1234", queue__logical_block_size="4096")
    part = whole / "nvme0n1p2"
    part.mkdir()
    (part / "partition").write_text("2\n")
    mapped = device(machine, "dm-0")
    (mapped / "slaves").mkdir()
    (mapped / "slaves" / "nvme0n1p2").symlink_to(part)
    found = disk_of(machine)
    assert found.device == "eui.1234 1000 sectors" and found.logical_block == 4096


@pytest.mark.parametrize(("direct", "cached"), [("0", True), ("1", False)])
def test_a_loop_device_is_a_cache_unless_it_reads_directly(machine: Path, direct: str, cached: bool) -> None:
    device(machine, "loop3", loop__dio=direct, loop__backing_file="/images/a.img")
    found = disk_of(machine)
    assert found.kind == "loop device" and "/images/a.img" in found.device
    assert bool(found.caches) is cached


@pytest.mark.parametrize("name", ["zram0", "ram0"])
def test_a_disk_in_ram_is_no_disk(machine: Path, name: str) -> None:
    device(machine, name)
    assert "RAM" in (disk_of(machine).caches or "")


@pytest.mark.parametrize("filesystem", ["tmpfs", "ramfs"])
def test_a_file_system_in_ram_is_no_disk(machine: Path, filesystem: str) -> None:
    mount(machine, str(machine), filesystem, filesystem)
    assert filesystem in (disk_of(machine / "sys").caches or "")


@pytest.mark.parametrize(
    ("filesystem", "source", "kind"),
    [("nfs4", "nas:/models", "network"), ("9p", "host", "network"), ("overlay", "overlay", "unknown disk")],
)
def test_mounts_without_a_device_are_named_for_what_they_are(
    machine: Path, filesystem: str, source: str, kind: str
) -> None:
    mount(machine, str(machine), filesystem, source)
    found = disk_of(machine)
    assert (found.kind, found.block_device, found.caches) == (kind, False, None)
    assert source in found.device and "SSD" not in found.label


def test_the_innermost_and_last_mount_counts_and_its_name_may_have_spaces(machine: Path) -> None:
    inner = machine / "my models"
    inner.mkdir()
    mount(machine, str(inner).replace(" ", "\\040"), "tmpfs", "tmpfs")
    assert disk_of(inner).kind == "memory"
    assert disk_of(machine).kind == "unknown disk"
    mount(machine, str(inner).replace(" ", "\\040"), "nfs4", "nas:/x")
    assert disk_of(inner).kind == "network"


def test_this_machine(tmp_path: Path) -> None:
    here = disk_of(tmp_path)
    assert here == disk_of(tmp_path.parent) and here.device and here.filesystem != "unknown"
    check_same_disk(here.device, tmp_path, "nothing to do")
    with pytest.raises(UserError, match=r"another disk .*: buy it"):
        check_same_disk("that one", tmp_path, "buy it")
    with pytest.raises(UserError, match="No such file"):
        disk_of(tmp_path / "missing")
