"""Whether a policy file of `edgemoe tune` is about the model that it is used on."""

from pathlib import Path

from edgemoe.evaluation.identity import weights_of
from edgemoe.model import read_model
from edgemoe.policy.policy_file import is_policy_file, load_policy_file


def check_policy_file(name: str | None, path: str | Path) -> None:
    """Raise `UserError` if `name`, a value of --policy, is a policy file tuned for another model than `path`."""
    if name is not None and is_policy_file(name):
        load_policy_file(name).check_model(name, weights_of(read_model(path)))
