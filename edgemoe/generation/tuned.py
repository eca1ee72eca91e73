"""Policies and calibrations by name: presets, and the policy files of `edgemoe tune`, which are about one model."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgemoe.calibration import Calibration
    from edgemoe.policy import Policy


def check_policy_file(name: str | None, path: str | Path) -> None:
    """Raise `UserError` if `name`, a value of --policy, is a policy file tuned for another model than `path`."""
    from edgemoe.model import read_model
    from edgemoe.model.fingerprint import weights_of
    from edgemoe.policy.policy_file import is_policy_file, load_policy_file

    if name is not None and is_policy_file(name):
        load_policy_file(name).check_model(name, weights_of(read_model(path)))


def named(
    policy: "Policy | str | None", calibration: "Calibration | str | Path | None", path: str | Path
) -> "tuple[Policy | None, Calibration | None]":
    """What these say for the model `path`; a policy file brings its calibration unless another is given.

    Raises `UserError`, one line, for what is missing, damaged, or another model's.
    """
    from edgemoe.calibration import load_calibration
    from edgemoe.model import read_model
    from edgemoe.policy import preset
    from edgemoe.policy.policy_file import calibration_beside

    if isinstance(policy, str):
        check_policy_file(policy, path)
        calibration = calibration or calibration_beside(policy)
        policy = preset(policy)
    if isinstance(calibration, str | Path):
        model = read_model(path)
        # A folder has no GGUF header that a calibration could name; engines compare their shapes.
        calibration = load_calibration(calibration, model if model.format == "GGUF" else None)
    return policy, calibration
