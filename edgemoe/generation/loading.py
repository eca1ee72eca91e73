"""From a file to a writer: the whole model in RAM, or its experts read from disk within a budget."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.errors import UserError
from edgemoe.generation.writer import Writer
from edgemoe.progress import Advance, no_progress
from edgemoe.units import Residency, parse_bytes

if TYPE_CHECKING:
    from edgemoe.calibration import Calibration
    from edgemoe.policy import Policy


def load(
    path: str | Path,
    *,
    ram: int | str | None = None,
    residency: Residency | str | None = None,
    policy: "Policy | str | None" = None,
    calibration: "Calibration | str | Path | None" = None,
    advance: Advance = no_progress,
    **settings: Any,
) -> Writer:
    """A writer on a GGUF model.

    Without `ram` and `residency`, llama.cpp holds the whole model, and `settings` are those of
    `edgemoe.llamacpp.resident.ResidentEngine`. With `ram` (bytes, or `"6GB"`) the process holds no more than that, with
    `residency` (`"50%"`, `"32"`, `"6GB"`) so many experts: the others are read from disk when they are executed, and
    `settings` are those of `edgemoe.streaming.engine.StreamingEngine`. `policy` is a preset's name or a `Policy`, exact
    LRU by default; `calibration` a file of `edgemoe calibrate`. `advance` counts to `load_steps`.

    Raises `UserError`, one line, for a file that is missing, damaged or no GGUF, and for what does not fit.
    """
    from edgemoe.model import read_model

    model = read_model(path)
    if model.format != "GGUF":
        raise UserError(f"{path}: text is generated from GGUF files, this is a safetensors directory: convert it first")
    if ram is None and residency is None:
        from edgemoe.llamacpp.resident import ResidentEngine

        if policy is not None or calibration is not None:
            raise UserError("a policy decides which experts are in RAM: give ram or residency with it")
        return Writer(ResidentEngine(path, advance=advance, **settings))
    from edgemoe.calibration import load_calibration
    from edgemoe.policy import preset
    from edgemoe.streaming.engine import StreamingEngine

    if isinstance(calibration, str | Path):
        calibration = load_calibration(calibration, model)
    writer = Writer(
        StreamingEngine(
            path,
            ram=parse_bytes(ram) if isinstance(ram, str) else ram,
            residency=Residency.parse(residency) if isinstance(residency, str) else residency,
            policy=preset(policy) if isinstance(policy, str) else policy,
            calibration=calibration,
            advance=advance,
            **settings,
        )
    )
    writer.calibration = calibration
    return writer


def load_steps(path: str | Path, streamed: bool) -> tuple[int, int]:
    """What `load` counts to in `advance`, and the bytes that it has read by then."""
    from edgemoe.model import read_model

    model = read_model(path)
    if streamed:
        from edgemoe.streaming.skeleton import dense_bytes

        return dense_bytes(model), dense_bytes(model)
    from edgemoe.llamacpp.resident import LOAD_STEPS

    return LOAD_STEPS, sum(file.stat().st_size for file in model.files)
