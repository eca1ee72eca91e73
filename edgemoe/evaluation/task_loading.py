"""lm-evaluation-harness tasks by name, or from YAML files whose questions lie beside them.

lm_eval prints, logs and draws bars; here it is silent, and what goes wrong in it is one line.
"""

import logging
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.errors import UserError

_ENDINGS = (".yaml", ".yml")
_LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "transformers", "httpx", "urllib3", "filelock")


@contextmanager
def silent() -> Iterator[None]:
    """Nothing that lm_eval says reaches a stream; its loggers are as before afterwards."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's and numpy's own generators, which tasks draw from, start at `seed`, and go on as before afterwards."""
    python, numpys = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)


def check_installed() -> None:
    """Import lm_eval, silently; `UserError` where it, or something that it needs, is missing or too old."""
    try:
        with silent():
            import lm_eval.evaluator
            from lm_eval.tasks import TaskManager

            assert lm_eval.evaluator.evaluate
    except ModuleNotFoundError as error:
        missing = (error.name or "lm_eval").partition(".")[0]
        raise UserError(f"edgemoe eval tasks needs {missing}: pip install edgemoe[eval]") from None
    if not hasattr(TaskManager, "load"):
        raise UserError(f"lm-eval {lm_eval.__version__} is too old: pip install --upgrade edgemoe[eval]")


def load_tasks(names: Sequence[str]) -> dict[str, Any]:
    """What `lm_eval.tasks.TaskManager.load` gives for task, group and tag names, YAML files, and folders of them.

    Data files that a YAML names are looked for beside it first; tasks that need no others are loaded without asking the
    network for anything. Raises `UserError` for a name or file that is none, and for questions that cannot be loaded.
    """
    if not names or not all(names):
        raise UserError("--tasks: expected names or files of tasks, separated by commas")
    local: list[dict[str, Any]] = []
    registered = []
    for name in names:
        path = Path(name).expanduser()
        if path.suffix in _ENDINGS or "/" in name or (path.is_dir() and any(path.glob("*.yaml"))):
            local += _configs(path)
        else:
            registered.append(name)
    manager = _manager(bool(registered) or any(isinstance(config.get("task"), list) for config in local))
    for name in registered:
        if name not in manager.task_index:
            raise UserError(
                f"no task {name} in lm-eval: expected one of its {len(manager.all_tasks):,} names (lm-eval ls tasks), "
                "or a YAML file"
            )
    offline = not registered and all(_is_local(config) for config in local)
    return _loaded(manager, [*registered, *local], offline)


def _manager(everything: bool) -> Any:
    """Reading the thousands of files of lm-eval's own tasks takes seconds: only where one is asked for."""
    with silent():
        from lm_eval.tasks import TaskManager

        return TaskManager(include_defaults=everything)


def _configs(path: Path) -> list[dict[str, Any]]:
    """The tasks that a YAML file, or each of a folder's, describes."""
    if path.is_dir():
        files = sorted(file for ending in _ENDINGS for file in path.rglob(f"*{ending}"))
        found = [config for file in files if (config := _config(file)).get("task")]
        if not found:
            raise UserError(f"{path}: no YAML file of a task in this folder")
        return found
    if not path.is_file():
        raise UserError(f"{path}: no such task file")
    config = _config(path)
    if not config.get("task"):
        raise UserError(f"{path}: names no task (task: NAME): expected an lm-eval task file")
    return [config]


def _config(path: Path) -> dict[str, Any]:
    with silent():
        from lm_eval.tasks._yaml_loader import load_yaml

        try:
            config: dict[str, Any] = load_yaml(path)
        # A task file is a program in parts: whatever it raises is about this file, and one line.
        except Exception as error:
            raise UserError(f"{path}: not an lm-eval task file ({_first_line(error)})") from None
    settings = config.get("dataset_kwargs")
    if isinstance(settings, dict):
        for key in ("data_files", "data_dir"):
            if key in settings:
                settings[key] = _beside(path.parent, settings[key])
    return config


def _beside(folder: Path, named: Any) -> Any:
    """Paths that exist beside the YAML as such; others as they are, from the working directory on."""
    if isinstance(named, dict):
        return {key: _beside(folder, value) for key, value in named.items()}
    if isinstance(named, list):
        return [_beside(folder, value) for value in named]
    if isinstance(named, str) and "://" not in named and (folder / named).exists():
        return str((folder / named).resolve())
    return named


def _is_local(config: Mapping[str, Any]) -> bool:
    """Whether its questions come from local files alone."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    if isinstance(config.get("task"), list):
        return False
    source = config.get("dataset_path")
    if source is None or callable(config.get("custom_dataset")):
        return False
    settings = config.get("dataset_kwargs") or {}
    return source in _PACKAGED_DATASETS_MODULES and "://" not in repr(settings.get("data_files"))


def _loaded(manager: Any, specs: list[Any], offline: bool) -> dict[str, Any]:
    for spec in specs:
        name = spec if isinstance(spec, str) else spec["task"]
        _check_files(name, spec)
    try:
        with silent(), _offline(offline):
            found: dict[str, Any] = manager.load(specs)
    # lm_eval and datasets raise anything: what a person can do about it is in the first line.
    except Exception as error:
        names = ", ".join(spec if isinstance(spec, str) else str(spec["task"]) for spec in specs)
        if _is_network(error):
            raise UserError(
                f"--tasks {names}: the questions are neither on this machine nor can they be downloaded "
                f"({_first_line(error)}): connect to the network once, or give a task file with local data"
            ) from None
        raise UserError(f"--tasks {names}: lm-eval cannot load this ({_first_line(error)})") from None
    return found


def _check_files(name: str, spec: Any) -> None:
    settings = spec.get("dataset_kwargs") if isinstance(spec, dict) else None
    for named in _flat(settings.get("data_files")) if isinstance(settings, dict) else ():
        if "://" not in named and not any(mark in named for mark in "*?[") and not Path(named).exists():
            raise UserError(f"{name}: its data file {named} is not there: put it beside the task's YAML")


def _flat(named: Any) -> Iterator[str]:
    if isinstance(named, str):
        yield named
    elif isinstance(named, dict | list):
        for value in named.values() if isinstance(named, dict) else named:
            yield from _flat(value)


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """datasets and huggingface_hub as if HF_HUB_OFFLINE were set, for as long as this lasts."""
    import datasets
    from huggingface_hub import constants

    if not wanted:
        yield
        return
    was = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = was


def _is_network(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is about reaching the hub."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    kinds = (ConnectionError, TimeoutError, DatasetNotFoundError, HfHubHTTPError, LocalEntryNotFoundError)
    while error is not None:
        if isinstance(error, (*kinds, OfflineModeIsEnabled)) or type(error).__module__.startswith(
            ("httpx", "requests")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
