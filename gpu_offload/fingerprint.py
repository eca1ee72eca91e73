"""What names a model beyond doubt, and whether a calibration is of it."""

import hashlib

from edgemoe.calibration import Calibration
from edgemoe.errors import UserError
from edgemoe.model import Model


def fingerprint(model: Model) -> list[str]:
    """Of each file's header: names, types, shapes and places of the tensors, and the hyperparameters."""
    if model.format == "GGUF":
        from edgemoe.llamacpp.header import header_fingerprint

        return [header_fingerprint(path) for path in model.files]
    content = [(model.path / "config.json").read_bytes()]
    for path in model.files:
        with path.open("rb") as file:
            content.append(file.read(int.from_bytes(file.read(8), "little")))
    return [hashlib.sha256(part).hexdigest() for part in content]


def fitting(calibration: Calibration | None, model: Model) -> Calibration | None:
    """The calibration, or a `UserError`. A safetensors folder has no GGUF header that a calibration could name: its
    shape must agree at least."""
    geometry = model.geometry
    if calibration is not None and (
        tuple(calibration.layers.tolist()) != geometry.moe_layers or calibration.n_experts != geometry.n_experts
    ):
        raise UserError(
            f"a calibration of {calibration.model}, with {len(calibration.layers)} layers of {calibration.n_experts} "
            f"experts, not of this {geometry.name}: run `edgemoe calibrate` on it"
        )
    return calibration
