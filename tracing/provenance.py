"""What a trace says about where it comes from: model, software, texts, settings."""

import ctypes
import dataclasses
import datetime
import importlib.metadata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgemoe import __version__
from edgemoe.llamacpp.graph import Router
from edgemoe.llamacpp.header import header_fingerprint
from edgemoe.llamacpp.libraries import ggml_base, llama
from edgemoe.llamacpp.session import Session
from edgemoe.model import Model
from edgemoe.tracing.texts import Text

if TYPE_CHECKING:
    from edgemoe.tracing.capture import Settings


def llama_cpp_build() -> dict[str, str]:
    """The llama.cpp that ran: package version, ggml version and commit, instruction sets."""
    library = ggml_base()
    said = {"package": importlib.metadata.version("llama-cpp-python")}
    for name in ("ggml_version", "ggml_commit"):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_char_p, ()
        said[name] = function().decode()
    return {**said, "system": llama().llama_print_system_info().decode().strip()}


def provenance(
    model: Model,
    session: Session,
    texts: Sequence[Text],
    settings: "Settings",
    routers: Sequence[Router],
    n_experts: int,
) -> dict[str, Any]:
    """The trace file's `meta`, less what only the end of the run knows. The first keys are the published format's."""
    top_k = [router.top_k for router in routers]
    return {
        **of_model(model, session.description, session.bos, top_k, n_experts),
        "source": f"edgemoe {__version__} trace (llama.cpp eval callback, weights untouched)",
        "texts": described(texts),
        "settings": {
            **dataclasses.asdict(settings),
            "n_threads": session.n_threads,
            "n_batch": session.n_batch,
            "n_ubatch": session.n_ubatch,
        },
    }


def of_model(
    model: Model, description: str, bos: int | None, layer_top_k: Sequence[int], n_experts: int
) -> dict[str, Any]:
    """What every trace's `meta` says of the model and the software that ran it, now."""
    return {
        "model": model.geometry.name,
        "top_k": max(layer_top_k),
        "k": max(layer_top_k),
        "num_experts": n_experts,
        "n_moe_layers": len(layer_top_k),
        "layer_top_k": list(layer_top_k),
        "model_file": model.files[0].name,
        "model_description": description,
        "architecture": model.geometry.architecture,
        "header_sha256": [header_fingerprint(file) for file in model.files],
        "llama_cpp": llama_cpp_build(),
        "bos": bos,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def described(texts: Sequence[Text]) -> list[dict[str, Any]]:
    """Texts as a file's `meta` names them."""
    return [
        {
            "domain": text.source.domain,
            "file": text.source.path.name,
            "sha256": text.sha256,
            "tokens": len(text.tokens),
        }
        for text in texts
    ]
