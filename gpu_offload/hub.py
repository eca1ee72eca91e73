"""Model names of the Hugging Face hub, as paths."""

import re
from pathlib import Path

from edgemoe.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve(model: str | Path) -> Path:
    """The path itself if there is one, else the folder of a hub name (`allenai/OLMoE-1B-7B-0924-Instruct`), downloaded
    by huggingface_hub where it is not in its cache. Raises `UserError`, one line that says what was tried."""
    path, name = Path(model), str(model)
    if path.exists() or not _NAME.fullmatch(name) or path.suffix == ".gguf":
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f"{name}: no such file here, and huggingface_hub, which could look on the hub, is not installed: "
            "pip install edgemoe[gpu], or give a path"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{name}: no such file here, and huggingface_hub could not get it ({reason}): check the name and the "
            "network, or give a path"
        ) from None
