"""Which weights and which vocabulary a result is about: the same for every engine that reads the same files."""

from edgemoe.evaluation.results import ModelId
from edgemoe.gpu_offload.vocabulary import FolderVocabulary, GgufVocabulary
from edgemoe.model import Model
from edgemoe.model.fingerprint import fingerprint, weights_of


def model_id(model: Model, words: GgufVocabulary | FolderVocabulary) -> ModelId:
    """By the names, weights and pieces in its files."""
    pieces = (words.piece(token, special=True) for token in range(words.size))
    return ModelId(model.geometry.name or model.path.stem, weights_of(model), fingerprint(pieces))
