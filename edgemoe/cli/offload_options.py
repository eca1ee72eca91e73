"""Options of the commands that run a model with its experts in RAM and slots for some of them on a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from typing import Any

    from edgemoe.cli.policy_options import Streaming
    from edgemoe.cli.sampling_options import Holding

Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Hold all experts in RAM and --residency of them on this device: cuda, or cpu to watch the same policies"
        " without a GPU. For OLMoE's architecture: a GGUF file, a safetensors folder or a Hugging Face name.",
    ),
]
Gpu = Annotated[
    int | None, typer.Option("--gpu", metavar="N", min=0, help="With --device cuda: which GPU. Default: the first, 0.")
]
DrivenBy = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="NAME",
        help="With --device cuda: device, the GPU decides for itself, a whole token at once; or host, the host decides"
        " between two steps of every layer. Default: device, but host under Windows' driver (WSL).",
    ),
]
Vram = Annotated[
    str | None,
    typer.Option("--vram", metavar="SIZE", help="With --device: hold no more on it than this, context included."),
]
StoredAs = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="TYPE", help="With --device: how weights and context are stored, bfloat16 or float32."
    ),
]
VerifySlots = Annotated[
    bool, typer.Option("--verify-slots", help="With --device: compare every slot with its expert after each step.")
]


@dataclass(frozen=True)
class Offload:
    """The device, and what it holds."""

    device: Device = None
    gpu: Gpu = None
    executor: DrivenBy = None
    vram: Vram = None
    dtype: StoredAs = None
    verify_slots: VerifySlots = False

    def settings(self, experts: Streaming, holding: Holding) -> dict[str, Any]:
        """What `edgemoe.generation.load` is given; without --device, what `experts` says.

        Raises `UserError` for a value that is out of range, and for options that mean nothing beside the others.
        """
        from edgemoe.errors import UserError
        from edgemoe.units import Residency, parse_bytes

        if self.device is None:
            for name, value in vars(self).items():
                if value is not None and value is not False:
                    raise UserError(f"--{name.replace('_', '-')} is about experts on a device: give --device with it")
            return experts.settings()
        self._refuse(experts, holding)
        settings: dict[str, Any] = {
            "device": self.device,
            "gpu": self.gpu,
            "executor": self.executor,
            "residency": None if experts.residency is None else Residency.parse(experts.residency),
            "vram": None if self.vram is None else parse_bytes(self.vram),
            **experts.decided_by(),
            "chunk": experts.chunk,
            "dtype": self.dtype,
            "verify_slots": self.verify_slots or None,
        }
        return {name: value for name, value in settings.items() if value is not None}

    def _refuse(self, experts: Streaming, holding: Holding) -> None:
        from edgemoe.errors import UserError

        disk = {name: getattr(experts, name, None) for name in ("ram", "plan", "readers", "verify_reads")}
        llamacpp = {"n_gpu_layers": holding.n_gpu_layers, "kv_type": holding.kv_type != "f16"}
        for found, what in ((disk, "experts on disk"), (llamacpp, "llama.cpp")):
            given = [name for name, value in found.items() if value]
            if given:
                name = given[0].replace("_", "-")
                raise UserError(f"--{name} is about {what}, --device about experts in RAM: leave one out")

    def resolved(self, model: Path) -> Path:
        """Where the model is: with --device, also one that has a name on the Hugging Face hub."""
        if self.device is None:
            return model
        from edgemoe.gpu_offload.hub import resolve

        return resolve(model)
