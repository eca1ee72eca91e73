"""Which machine is this? What a saved profile is keyed by: the host and its GPUs, and how to tell that they changed."""

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

MACHINE_ID = Path("/etc/machine-id")
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Host:
    """`id` is a hash, so that a profile can be shared without telling which machine it came from."""

    id: str
    cpu: str
    cores: int
    ram_bytes: int

    def __post_init__(self) -> None:
        if self.cores < 1 or self.ram_bytes < 1:
            raise ValueError(f"{self.cores} cores and {self.ram_bytes} bytes of RAM are not a machine")

    @property
    def label(self) -> str:
        return f"{self.cores} × {self.cpu}"


def this_host() -> Host:
    """The machine that runs this: operating system's machine id (else its name), CPU model and cores."""
    import psutil

    try:
        installed = MACHINE_ID.read_text().strip()
    except OSError:
        installed = ""
    cpu, cores = cpu_model(), os.cpu_count() or 1
    text = f"edgemoe {installed or platform.node()} {cpu} {cores}"
    return Host(hashlib.sha256(text.encode()).hexdigest()[:16], cpu, cores, psutil.virtual_memory().total)


def cpu_model() -> str:
    """As the kernel names it; the architecture where it does not."""
    try:
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def gpu_uuids() -> tuple[str, ...]:
    """UUIDs of the GPUs that the driver shows, sorted; empty without a driver."""
    from edgemoe.machine.gpus import nvidia_gpus

    return tuple(sorted(gpu.uuid for gpu in nvidia_gpus()))


def profile_key(host: Host, uuids: tuple[str, ...]) -> str:
    """What the profile of this host with these GPUs is called."""
    return "-".join([host.id, *([hashlib.sha256(" ".join(uuids).encode()).hexdigest()[:8]] if uuids else [])])
