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


def check_fit(path: str | Path, **settings: Any) -> None:
    """Raise the `UserError` of a streaming `load` with these settings (or `load_streams`, with `streams`) that does not
    fit, before anything is compiled or loaded."""
    from inspect import signature

    from edgemoe.generation.tuned import named
    from edgemoe.streaming.fitting import fit

    policy, calibration = named(settings.get("policy"), settings.get("calibration"), path)
    known = {name: value for name, value in settings.items() if name in signature(fit).parameters}
    if isinstance(known.get("ram"), str):
        known["ram"] = parse_bytes(known["ram"])
    if known.get("residency") is not None:
        known["residency"] = Residency.of(known["residency"])
    fit(path, **{**known, "policy": policy, "calibrated": calibration is not None})


def load(
    path: str | Path,
    *,
    ram: int | str | None = None,
    residency: Residency | str | None = None,
    device: str | None = None,
    vram: int | str | None = None,
    policy: "Policy | str | None" = None,
    calibration: "Calibration | str | Path | None" = None,
    advance: Advance = no_progress,
    **settings: Any,
) -> Writer:
    """A writer on a GGUF model.

    Without `ram` and `residency`, llama.cpp holds the whole model, and `settings` are those of
    `edgemoe.llamacpp.resident.ResidentEngine`. With `ram` (bytes, or `"6GB"`) the process holds no more than that, with
    `residency` (`"50%"`, `"32"`, `"6GB"`) so many experts: the others are read from disk when they are executed, and
    `settings` are those of `edgemoe.streaming.engine.StreamingEngine`. `policy` is a preset's name, a
    policy file of `edgemoe tune` or a `Policy`, exact LRU by default; `calibration` a file of `edgemoe calibrate`, by
    default that of the policy file. `advance` counts to `load_steps`.

    With `device` (`"cpu"` or `"cuda"`) all experts are in RAM and `residency`, or what `vram` bytes hold, on the
    device: the model may be a safetensors folder or a hub name, and `settings` are those of
    `edgemoe.gpu_offload.engine.OffloadEngine`.

    Raises `UserError`, one line, for a file that is missing, damaged or no GGUF, and for what does not fit.
    """
    from edgemoe.model import read_model

    residency = None if residency is None else Residency.of(residency)
    if device is not None:
        if ram is not None:
            raise UserError("ram is for experts on disk, device for experts in RAM: give one")
        settings |= {"device": device, "residency": residency, "advance": advance}
        settings["vram"] = parse_bytes(vram) if isinstance(vram, str) else vram
        return _offloaded(path, policy, calibration, **settings)
    model = read_model(path)
    if model.format != "GGUF":
        raise UserError(f"{path}: text is generated from GGUF files, this is a safetensors directory: convert it first")
    if ram is None and residency is None:
        from edgemoe.llamacpp.resident import ResidentEngine

        if policy is not None or calibration is not None:
            raise UserError("a policy decides which experts are in RAM: give ram or residency with it")
        return Writer(ResidentEngine(path, advance=advance, **settings))
    from edgemoe.generation.tuned import named
    from edgemoe.streaming.engine import StreamingEngine

    policy, calibration = named(policy, calibration, path)
    writer = Writer(
        StreamingEngine(
            path,
            ram=parse_bytes(ram) if isinstance(ram, str) else ram,
            residency=residency,
            policy=policy,
            calibration=calibration,
            advance=advance,
            **settings,
        )
    )
    writer.calibration = calibration
    return writer


def _offloaded(
    path: str | Path,
    policy: "Policy | str | None",
    calibration: "Calibration | str | Path | None",
    n_gpu_layers: int = 0,
    kv_type: str = "f16",
    **settings: Any,
) -> Writer:
    """A writer on the engine that keeps experts in RAM; it has no use for llama.cpp's settings."""
    try:
        from edgemoe.gpu_offload.engine import OffloadEngine
        from edgemoe.gpu_offload.hub import resolve
    except ModuleNotFoundError as error:
        raise UserError(f"--device needs {error.name}: pip install edgemoe[gpu]") from None
    from edgemoe.generation.tuned import named

    if n_gpu_layers or kv_type != "f16":
        raise UserError("n_gpu_layers and kv_type are for llama.cpp, device is not: leave one out")
    path = resolve(path)
    policy, calibration = named(policy, calibration, path)
    writer = Writer(OffloadEngine(path, policy=policy, calibration=calibration, **settings))
    writer.calibration = calibration
    return writer


def load_steps(path: str | Path, streamed: bool, device: str | None = None) -> tuple[int, int]:
    """What `load` counts to in `advance`, and the bytes that it has read by then."""
    from edgemoe.model import Part, read_model

    if device is not None:
        from edgemoe.gpu_offload.hub import resolve

        total = sum(t.nbytes for t in read_model(resolve(path)).tensors if t.part is not Part.UNUSED)
        return total, total
    model = read_model(path)
    if streamed:
        from edgemoe.streaming.skeleton import dense_bytes

        return dense_bytes(model), dense_bytes(model)
    from edgemoe.llamacpp.resident import LOAD_STEPS

    return LOAD_STEPS, sum(file.stat().st_size for file in model.files)
