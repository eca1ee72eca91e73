"""What computing alone takes: stock llama.cpp with all of the model in RAM, on the same routing.

It is the limit that no reading can lower, and what reads are to hide behind.
"""

from pathlib import Path
from statistics import median

from edgemoe.bench.arm import MAPPED, Opening
from edgemoe.bench.child import Child
from edgemoe.progress import Advance

STEPS = 12  # what `resident_step` tells `advance` in all
_WARM, _SECONDS = 3, 2.0


def resident_step(model: Path, streams: int, n_ctx: int, threads: int, forced: str, advance: Advance) -> float:
    """Median seconds of a step of so many streams, with every page in the page cache already."""
    opening = Opening(MAPPED, str(model), streams, n_ctx, threads, forced)
    with Child(opening, None, 0) as child:
        child.steps(0, _WARM)
        spent: list[float] = []
        while len(spent) < STEPS - _WARM and (len(spent) < _WARM or sum(spent) < _SECONDS):
            spent += child.steps(_WARM + len(spent), 1)["seconds"]
    advance(STEPS)
    return median(spent)


def read_into_cache(path: Path) -> None:
    """Read a file once, so that all of it is in the page cache."""
    buffer = bytearray(8 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            continue
