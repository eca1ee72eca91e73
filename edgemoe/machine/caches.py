"""How large the last-level cache is: what a working set must exceed to be read from RAM."""

from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
FALLBACK = 64 << 20  # where the system does not say: more than most have
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level_cache(cpus: Path = CPUS) -> int:
    """Bytes of last-level cache of all CPUs together, each shared cache counted once."""
    found: dict[int, dict[str, int]] = {}  # level → CPUs that share it → bytes
    for index in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level, shared = int((index / "level").read_text()), (index / "shared_cpu_list").read_text().strip()
            size = (index / "size").read_text().strip()
            found.setdefault(level, {})[shared] = int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    total = sum(found[max(found)].values()) if found else 0
    return total or FALLBACK
