"""Which weights and which vocabulary a result is about: the same for every engine that reads the same files."""

from edgemoe.evaluation.results import ModelId, fingerprint
from edgemoe.gpu_offload.vocabulary import FolderVocabulary, GgufVocabulary
from edgemoe.model import Model, Part


def model_id(model: Model, words: GgufVocabulary | FolderVocabulary) -> ModelId:
    """Of a GGUF file its header's fingerprint, or all shards'; of a folder its config, headers, and what its routers
    and norms weigh, since a fine-tuned model has the header of the one that it was made from."""
    pieces = (words.piece(token, special=True) for token in range(words.size))
    return ModelId(model.geometry.name or model.path.stem, weights_of(model), fingerprint(pieces))


def weights_of(model: Model) -> str:
    """The fingerprint of the weights alone."""
    if model.format == "GGUF":
        from edgemoe.llamacpp.header import header_fingerprint

        headers = [header_fingerprint(path) for path in model.files]
        return headers[0] if len(headers) == 1 else fingerprint(headers)
    parts = [(model.path / "config.json").read_bytes()]
    for at, path in enumerate(model.files):
        with path.open("rb") as file:
            parts.append(file.read(int.from_bytes(file.read(8), "little")))
            for tensor in model.tensors:
                if tensor.file == at and tensor.part in (Part.ROUTER, Part.NORMS):
                    file.seek(tensor.offset)
                    parts.append(file.read(tensor.nbytes))
    return fingerprint(parts)
