"""Which disk is under a path, and what may its rate be called? Read from the kernel's tables; nothing is measured."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from edgemoe.errors import UserError

SYS = Path("/sys")
MOUNTS = Path("/proc/self/mountinfo")

_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "afs", "gpfs", "beegfs", "fuse.sshfs"}
_VIRTUAL = re.compile(r"qemu|vmware|virtual|vbox|msft|google|elastic block|virtio", re.IGNORECASE)


@dataclass(frozen=True)
class Disk:
    """`device` identifies it across boots; `kind` is a word for it; `label` says more, for people.

    Reads of a `block_device` are counted by the kernel (edgemoe.machine.page_cache). `caches` is why a rate measured
    there would be that of memory, where that is known beforehand.
    """

    device: str
    filesystem: str
    kind: str
    label: str
    block_device: bool = False
    logical_block: int = 512
    caches: str | None = None


@dataclass(frozen=True)
class _Mount:
    point: str
    number: str
    filesystem: str
    source: str


def disk_of(path: Path) -> Disk:
    """The disk that holds `path`, which must exist. Raises `UserError` if it does not."""
    try:
        place = path.resolve(strict=True)
        number = place.stat().st_dev
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    mount = _mount_of(place)
    if mount.filesystem in _MEMORY:
        what = f"{mount.filesystem} at {mount.point}"
        return Disk(what, mount.filesystem, "memory", what, caches=f"{mount.filesystem} keeps its files in RAM")
    block = _block_device(number, mount.source)
    if block is None:
        return _without_device(mount, place)
    return _describe(block, mount.filesystem)


def check_same_disk(measured: str, path: Path, again: str) -> None:
    """Raise `UserError` unless the device measured is the one that holds `path`; `again` says what to do."""
    here = disk_of(path)
    if here.device != measured:
        raise UserError(f"{path} is on another disk ({here.device}) than the profile's ({measured}): {again}")


def _mount_of(place: Path) -> _Mount:
    """The innermost mount over `place`; of several at one point, the last, which covers the others."""
    found = _Mount("/", "0:0", "unknown", "unknown")
    for line in MOUNTS.read_text().splitlines():
        front, _, back = line.partition(" - ")
        fields, (filesystem, source) = front.split(), back.split()[:2]
        point = _unescape(fields[4])
        inside = place == Path(point) or Path(point) in place.parents
        if inside and len(point) >= len(found.point):
            found = _Mount(point, fields[2], filesystem, _unescape(source))
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _block_device(number: int, source: str) -> Path | None:
    """The whole device's folder in sysfs; file systems with numbers of their own (btrfs) name it as their source."""
    if os.major(number) == 0:
        try:
            number = os.stat(source).st_rdev if source.startswith("/dev/") else 0  # noqa: PTH116
        except OSError:
            return None
        if not number:
            return None
    folder = SYS / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if not folder.exists():
        return None
    return _whole(folder.resolve())


def _whole(folder: Path) -> Path:
    """From a partition to its disk, and from a mapping (LUKS, LVM) that has one disk below to that disk."""
    if (folder / "partition").exists():
        folder = folder.parent
    below = sorted((folder / "slaves").iterdir()) if (folder / "slaves").is_dir() else []
    return _whole(below[0].resolve()) if len(below) == 1 else folder


def _describe(block: Path, filesystem: str) -> Disk:
    name = block.name
    model = " ".join(filter(None, (_text(block / "device" / "vendor"), _text(block / "device" / "model"))))
    serials = (block / "wwid", block / "device" / "wwid", block / "serial", block / "device" / "serial")
    serial = next(filter(None, map(_text, serials)), "")
    sectors = _text(block / "size")
    device = " ".join(filter(None, (model, serial or name, f"{sectors} sectors")))
    kind, caches = _kind(block, name, model), None
    if name.startswith(("zram", "ram")):
        kind, caches = "memory", f"{name} is a disk in RAM"
    elif (block / "loop").is_dir():
        device = f"loop over {_text(block / 'loop' / 'backing_file')}, {sectors} sectors"
        if _text(block / "loop" / "dio") != "1":
            caches = f"{name} is a loop device that reads its file through the page cache (losetup --direct-io=on)"
    what = f"{kind} {name}" + (f" ({model})" if model else "")
    if kind == "virtual disk":
        what += ", which its host may cache"
    logical = int(_text(block / "queue" / "logical_block_size") or 512)
    return Disk(device, filesystem, kind, f"{what}, {filesystem}", True, logical, caches)


def _kind(block: Path, name: str, model: str) -> str:
    if (block / "loop").is_dir():
        return "loop device"
    # Before "rotational", which virtual disks report as they please.
    if name.startswith(("vd", "xvd")) or _VIRTUAL.search(model):
        return "virtual disk"
    return "hard disk" if _text(block / "queue" / "rotational") == "1" else "SSD"


def _without_device(mount: _Mount, place: Path) -> Disk:
    """Network mounts, overlays, FUSE, ZFS: named by what is mounted; two of one name differ by their system id."""
    identity = f"{mount.filesystem} {mount.source} {os.statvfs(place).f_fsid:x}"
    if mount.filesystem in _NETWORK:
        label = f"network file system {mount.source} ({mount.filesystem}), which its server may cache"
        return Disk(identity, mount.filesystem, "network", label)
    label = f"unknown disk under {mount.filesystem} at {mount.point}"
    return Disk(identity, mount.filesystem, "unknown disk", label)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
