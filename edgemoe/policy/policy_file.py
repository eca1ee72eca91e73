"""The policy file that `edgemoe tune` writes: an operating point, and what it was measured to cost.

JSON, to be read by people too. It holds for one model, whose fingerprint it carries, at the residency that it was tuned
for, with the calibration that lies beside it: commands take it wherever they take a preset's name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgemoe.errors import UserError
from edgemoe.files import read_json, reason_of, write_json
from edgemoe.policy.config import Policy

FORMAT = "edgemoe policy"
VERSION = 1
ENDING = ".json"


@dataclass(frozen=True)
class PolicyFile:
    """One tuned policy. `measured`, `texts` and `config` are for the reader; the rest decides."""

    policy: Policy
    residency: str  # as it was asked for
    slots: int  # C: slots per layer, what that became
    model: Mapping[str, str]  # name, and the fingerprint of its weights as result files carry it
    header_sha256: tuple[str, ...]  # the model again, as traces and calibrations name it
    calibration: str  # file, relative to this one
    measured: Mapping[str, float]
    texts: tuple[Mapping[str, Any], ...] = ()
    config: Mapping[str, Any] | None = None

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all; `UserError` where it cannot be written."""
        said = {
            "format": FORMAT,
            "version": VERSION,
            "policy": asdict(self.policy),
            "policy_hash": self.policy.hash,
            "residency": self.residency,
            "slots": self.slots,
            "model": dict(self.model),
            "header_sha256": list(self.header_sha256),
            "calibration": self.calibration,
            "measured": dict(self.measured),
            "texts": [dict(text) for text in self.texts],
            "config": dict(self.config or {}),
        }
        write_json(path, said, indent=2)

    def check_model(self, path: str | Path, weights: str) -> None:
        """Raise `UserError` unless the model whose fingerprint is `weights` is the one that was tuned."""
        if weights != self.model["weights"]:
            raise UserError(
                f"{path}: tuned for {self.model['name']}, not for this model's weights: run `edgemoe tune` on this one"
            )

    def check_trace(self, path: str | Path, header_sha256: Sequence[str]) -> None:
        """Raise `UserError` unless a trace with these fingerprints is of the model that was tuned."""
        if tuple(header_sha256) != self.header_sha256:
            raise UserError(f"{path}: tuned for {self.model['name']}, the trace is of another model: tune that one")


def is_policy_file(name: str | None) -> bool:
    """Whether this value of --policy is a file rather than a preset's name."""
    return name is not None and name.endswith(ENDING)


def load_policy_file(path: str | Path) -> PolicyFile:
    """Read a policy file. Raises `UserError`, one line, for one that is missing, damaged or of another version."""
    said = read_json(path, "policy file", "write one with `edgemoe tune`")
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise UserError(f'{path}: not a policy file (expected "format": "{FORMAT}")')
    if said.get("version") != VERSION:
        shown = str(said.get("version"))[:20]
        raise UserError(f"{path}: a policy file of version {shown}, this edgemoe reads {VERSION}: tune again")
    try:
        policy = Policy(**said["policy"])
        if policy.hash != said["policy_hash"]:
            raise ValueError("its policy was edited")
        found = PolicyFile(
            policy,
            str(said["residency"]),
            int(said["slots"]),
            {name: str(said["model"][name]) for name in ("name", "weights")},
            tuple(map(str, said["header_sha256"])),
            str(said["calibration"]),
            dict(said["measured"]),
            tuple(said["texts"]),
            dict(said["config"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a sound policy file ({reason_of(error)}): tune again") from None
    return found


def calibration_beside(*names: str | None) -> Path | None:
    """The calibration that these policy files were tuned with; None for presets' names alone.

    Raises `UserError` where it is gone, since another warm set or bonus scale is another operating point, and for files
    that were tuned with different ones.
    """
    found: list[tuple[str, Path]] = []
    for name in names:
        if name is None or not is_policy_file(name):
            continue
        path = Path(name).parent / load_policy_file(name).calibration
        if not path.is_file():
            raise UserError(f"{name}: its calibration {path} is not there: put it back, or give one with --calibration")
        found.append((name, path))
    for name, path in found[1:]:
        if path.read_bytes() != found[0][1].read_bytes():
            raise UserError(
                f"{found[0][0]} and {name} were tuned with different calibrations, a run has one: run them one by one, "
                "or give --calibration"
            )
    return found[0][1] if found else None
