"""Checks of the install a person really has, and what their machine can run.

diagnosis = diagnose(Path("."))
diagnosis.healthy, diagnosis.checks, diagnosis.abilities
"""

from dataclasses import dataclass
from pathlib import Path

from edgemoe.doctor.abilities import Ability, abilities
from edgemoe.doctor.check import Check
from edgemoe.doctor.hardware import check_direct_io, check_disk, check_gpus, check_offload, check_ram
from edgemoe.doctor.install import check_library, check_llama_version, check_packages, check_python, check_tracing
from edgemoe.errors import UserError
from edgemoe.machine.gpus import nvidia_gpus
from edgemoe.machine.memory import ram

__all__ = ["Ability", "Check", "Diagnosis", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
    """All checks in the order of the report, and what follows from them."""

    checks: tuple[Check, ...]
    abilities: tuple[Ability, ...]

    @property
    def healthy(self) -> bool:
        """Nothing needs fixing; warnings are allowed."""
        return all(check.status != "fix" for check in self.checks)


def diagnose(directory: Path) -> Diagnosis:
    """Run every check; `directory` is where models lie or will. A `UserError` if there is no such directory."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory: give --dir one where models are or will be")
    gpus, memory = nvidia_gpus(), ram()
    packages, library = check_packages(), check_library()
    tracing = (
        check_tracing() if library.status == "ok" else Check("self-test", "fix", "not run", "mend llama.cpp first")
    )
    checks = [check_python(), packages, check_llama_version(), library, tracing]
    checks += [check_offload(gpus, library), *check_gpus(gpus)]
    checks += [check_ram(memory), check_disk(directory), check_direct_io(directory)]
    return Diagnosis(tuple(checks), tuple(abilities(packages, library, tracing, memory, gpus)))
