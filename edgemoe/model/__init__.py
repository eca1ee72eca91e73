"""What a model file says: geometry, bytes by part, and where each expert lies. Headers only, no weights."""

from dataclasses import dataclass
from pathlib import Path

from edgemoe.errors import UserError
from edgemoe.model.assemble import assemble
from edgemoe.model.geometry import KvCache, ModelGeometry
from edgemoe.model.tensors import ExpertSlice, Part, Tensor, slice_expert

__all__ = ["ExpertSlice", "KvCache", "Model", "ModelGeometry", "Part", "Tensor", "read_model"]


@dataclass(frozen=True)
class Model:
    """A model on disk: its geometry, its files, and every tensor's place in them."""

    path: Path
    format: str  # GGUF or safetensors
    files: tuple[Path, ...]
    geometry: ModelGeometry
    tensors: tuple[Tensor, ...]

    def expert_tensors(self, layer: int) -> list[Tensor]:
        """The tensors that hold the experts of a layer (the model's own id), in file order."""
        found = [t for t in self.tensors if t.part is Part.EXPERTS and t.layer == layer]
        if not found:
            ids = self.geometry.moe_layers
            known = f"MoE layers are {ids[0]}–{ids[-1]}" if ids else "the model is dense"
            raise UserError(f"{self.path}: layer {layer} has no experts: {known}")
        return sorted(found, key=lambda t: (t.file, t.offset))

    def expert_slices(self, layer: int, expert: int) -> list[ExpertSlice]:
        """Where the bytes of one expert lie, tensor by tensor; together `geometry.expert_bytes` of that layer."""
        tensors = self.expert_tensors(layer)
        if not 0 <= expert < self.geometry.n_experts:
            raise UserError(f"{self.path}: no expert {expert}: it has {self.geometry.n_experts}, from 0")
        slices = (slice_expert(tensor, expert, self.geometry.n_experts) for tensor in tensors)
        return [found for found in slices if found]


def read_model(path: str | Path) -> Model:
    """Read the headers of a model: a GGUF file, any shard of a split one, or a directory with safetensors.

    Raises `UserError`, one line, for anything that is missing, truncated, corrupt or no model.
    """
    path = Path(path)
    if path.is_dir():
        from edgemoe.model.safetensors import read_safetensors

        kind, (facts, tensors, files) = "safetensors", read_safetensors(path)
    else:
        from edgemoe.model.gguf import read_gguf

        kind, (facts, tensors, files) = "GGUF", read_gguf(path)
    file_bytes = sum(file.stat().st_size for file in files)
    return Model(path, kind, tuple(files), assemble(str(path), facts, tensors, file_bytes), tuple(tensors))
