"""Which weights these are: a fingerprint that results and policy files carry."""

import hashlib
from collections.abc import Iterable

from edgemoe.model import Model, Part


def fingerprint(parts: Iterable[str | bytes]) -> str:
    """SHA-256 of a sequence of texts, each with its length: of a vocabulary's pieces in the order of their ids, or of
    a task's questions with all that goes into their prompts."""
    content = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        content.update(len(raw).to_bytes(8, "little") + raw)
    return content.hexdigest()


def weights_of(model: Model) -> str:
    """Of a GGUF file its header's fingerprint, or all shards'; of a folder its config, headers, and what its routers
    and norms weigh, since a fine-tuned model has the header of the one that it was made from."""
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
