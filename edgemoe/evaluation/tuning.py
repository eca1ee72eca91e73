"""Measuring operating points on a user's own text, and writing the best of them down.

The first part of each text calibrates, windows of the rest are measured, so that no measured token entered a warm set,
a bonus scale or a token prior (PSR paper §6.1, "Configuration selection"). A coarse grid is run in one pass that shares
exact routing; then λ is refined where the KL of the best families crosses the budget.

`OUT.json.partial` keeps every window of every policy that is finished, and `OUT.calib.partial` the calibration, until
both files are written: the same command after an interrupt, or with other limits or another grid, goes on with them.
"""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe import __version__
from edgemoe.calibration import Calibration, load_calibration
from edgemoe.errors import UserError
from edgemoe.evaluation.divergence import Extent, Watch
from edgemoe.evaluation.identity import model_id
from edgemoe.evaluation.journal import Journal
from edgemoe.evaluation.results import DAMAGE, ModelId
from edgemoe.evaluation.subject import Subject
from edgemoe.evaluation.subjects import Runs, calibration_of, check_model, default_engine, subject
from edgemoe.evaluation.token_metrics import METRICS, WindowMetrics
from edgemoe.evaluation.tune import Grid, Limits, Point, knee, point_of, refined
from edgemoe.evaluation.windows import fingerprint_of, text_windows
from edgemoe.evaluation.writer import partial_path, refuse_existing, refuse_input
from edgemoe.files import parse_json
from edgemoe.gpu_offload.vocabulary import open_vocabulary
from edgemoe.model import Model, read_model
from edgemoe.policy import Policy
from edgemoe.policy.policy_file import PolicyFile
from edgemoe.progress import Advance
from edgemoe.tracing.texts import Source, read_sources
from edgemoe.units import Residency

CALIBRATING = 0.5  # share of each text
FORMAT = "edgemoe tuning"
BYTES = "copied_bytes"


@dataclass(frozen=True)
class Tuned:
    """All points in the order in which they were asked for, the one that was chosen, and its file."""

    points: tuple[Point, ...]
    chosen: Point
    file: PolicyFile
    calibrating: Mapping[str, int]  # text → its first bytes, which calibrated; empty for a calibration that was given
    windows: int
    resumed: int
    """Windows of policies that an earlier run had measured."""
    notes: tuple[str, ...] = ()


def tune(
    path: str | Path,
    sources: Sequence[Source],
    out: Path,
    *,
    watch: Watch,
    residency: Residency,
    limits: Limits | None = None,
    grid: Grid | None = None,
    calibration: Path | None = None,
    engine: str | None = None,
    extent: Extent | None = None,
    runs: Runs | None = None,
    overwrite: bool = False,
) -> Tuned:
    """Tune a policy for a model at a residency, and write the policy file `out`, with its calibration beside it.

    calibration: a file of `edgemoe calibrate`, made from other text than `sources`; without one, the first half of each
    text calibrates and `out` with the ending `.calib` is written too. An interrupt, even a kill, leaves neither, and
    keeps what was measured: the same call goes on. Raises `UserError`, one line, for what cannot be read, steered or
    written, and for texts that are too short.
    """
    limits, grid, extent = limits or Limits(), grid or Grid(), extent or Extent()
    runs = runs or Runs(extent.length)
    kept = None if calibration else out.with_suffix(".calib")
    for place in (out, kept):
        if place is not None:
            refuse_existing(place, overwrite)
            refuse_input(place, sources)
    contents = read_sources(sources)
    model = read_model(path)
    check_model(model, extent.length)
    given = calibration_of(model, calibration) if calibration else None
    cuts = [0 if given else _cut(source, data) for source, data in zip(sources, contents, strict=True)]
    who, texts = _windows(model, sources, [data[cut:] for data, cut in zip(contents, cuts, strict=True)], extent)
    ran = subject(engine or default_engine(model.path), model, residency, calibration, runs)
    ran.check([Policy()])
    grid.policies(ran.slots)  # what is wrong with it is said now, and not when the calibration is done
    described = tuple(
        {"domain": s.domain, "file": s.path.name, "sha256": hashlib.sha256(data).hexdigest(), "calibrating": cut}
        for s, data, cut in zip(sources, contents, cuts, strict=True)
    )
    header = {
        "format": FORMAT,
        "edgemoe": __version__,
        "model": asdict(who),
        "config": {name: value for name, value in ran.configuration(Policy()).items() if name != "policy"},
        "texts": described,
        "windows": {domain: fingerprint_of(windows) for domain, windows in texts.items()},
    }
    with Journal(partial_path(out)) as journal:
        lines = journal.resume(header, overwrite)
        calibrated = given or _calibrated(model, sources, contents, cuts, out, lines, runs, extent.length, watch)
        ran.use(calibrated)
        measuring = _Measuring(ran, texts, journal, lines, calibrated.digest, model.geometry.expert_bytes, watch)
        coarse = [ran.completed(policy) for policy in grid.policies(ran.slots)]
        points = measuring.points(coarse, "coarse grid")
        more = [policy for policy in map(ran.completed, refined(points, limits)) if policy not in coarse]
        points += measuring.points(more, "refining")
        chosen = knee(points, limits)
        file = PolicyFile(
            chosen.policy,
            residency.text,
            ran.slots,
            {"name": who.name, "weights": who.fingerprint},
            calibrated.header_sha256,
            str(calibration.resolve()) if calibration else out.with_suffix(".calib").name,
            chosen.measured(),
            described,
            {**ran.configuration(chosen.policy), "max_kl": limits.max_kl, "max_excess": limits.max_excess},
        )
        if kept:
            calibrated.save(kept)
        file.save(out)
        journal.remove()
        if kept:
            partial_path(kept).unlink(missing_ok=True)
    return Tuned(
        points=tuple(points),
        chosen=chosen,
        file=file,
        calibrating={} if calibration else {str(s.path): cut for s, cut in zip(sources, cuts, strict=True)},
        windows=sum(map(len, texts.values())),
        resumed=measuring.resumed,
        notes=_notes(grid, ran.slots),
    )


def _notes(grid: Grid, slots: int) -> tuple[str, ...]:
    wide = ", ".join(str(width) for width in grid.windows if width > slots)
    return (f"no prefetch window of {wide}: a layer has {slots} slots",) if wide else ()


def _cut(source: Source, data: bytes) -> int:
    """Where the measured part of a text begins: behind a line's end, so never inside a character."""
    at = data.find(b"\n", int(len(data) * CALIBRATING)) + 1
    if not 0 < at < len(data):
        raise UserError(
            f"{source.path}: without a line's end in its second half it cannot be split into a part that calibrates "
            "and one that is measured: give a longer text, or --calibration"
        )
    return at


def _windows(
    model: Model, sources: Sequence[Source], contents: Sequence[bytes], extent: Extent
) -> tuple[ModelId, dict[str, list[np.ndarray]]]:
    words = open_vocabulary(model)
    try:
        return model_id(model, words), text_windows(sources, contents, words, extent.windows, extent.length)
    finally:
        words.close()


def _calibrated(
    model: Model,
    sources: Sequence[Source],
    contents: Sequence[bytes],
    cuts: Sequence[int],
    out: Path,
    lines: Sequence[bytes],
    runs: Runs,
    length: int,
    watch: Watch,
) -> Calibration:
    """The calibration of the first parts of the texts: what an earlier run left, if it is the one that its points were
    measured with, or a new one."""
    place = partial_path(out.with_suffix(".calib"))
    with suppress(UserError, IndexError, *DAMAGE):
        left = load_calibration(place)
        if left.digest == parse_json(lines[0])["calibration"]:
            return left
    place.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="edgemoe-tune-") as folder:
        parts = []
        for at, (source, data, cut) in enumerate(zip(sources, contents, cuts, strict=True)):
            part = Path(folder) / f"{at}-{source.path.name}"
            part.write_bytes(data[:cut])
            parts.append(Source(source.domain, part))
        _calibrate(model, parts, place, length, runs, watch)
    return calibration_of(model, place)


def _calibrate(model: Model, parts: Sequence[Source], out: Path, length: int, runs: Runs, watch: Watch) -> None:
    """With llama.cpp for a GGUF file, under transformers for a folder."""
    from edgemoe.tracing.capture import Settings

    settings = Settings(n_ctx=length, n_threads=runs.threads)
    if model.format == "GGUF":
        from edgemoe.tracing.calibrate import calibrate

        calibrate(model.path, parts, out, settings, watch=watch)
        return
    from edgemoe.gpu_offload.harness.folder import calibrate_folder

    def tokens(total: int) -> AbstractContextManager[Advance]:
        return watch("calibrating", total, "tokens")

    calibrate_folder(model, parts, out, settings, watch=tokens, dtype=runs.dtype, device=runs.device)


class _Measuring:
    """Runs policies on the windows, and keeps every window of every policy in the journal."""

    def __init__(
        self,
        ran: Subject,
        texts: Mapping[str, Sequence[np.ndarray]],
        journal: Journal,
        lines: Sequence[bytes],
        calibration: str,
        expert_bytes: Sequence[int],
        watch: Watch,
    ) -> None:
        """Raises `UserError` where what an earlier run left is damaged, or was measured with another calibration."""
        self._ran, self._texts, self._journal, self._watch = ran, texts, journal, watch
        self._expert_bytes = np.array(expert_bytes, np.float64)  # [L]
        self._windows = [window for found in texts.values() for window in found]
        self._kept: dict[tuple[Policy, int], dict[str, float]] = {}
        if not lines:
            journal.add({"calibration": calibration})
        for at, line in enumerate(lines):
            try:
                said = parse_json(line)
                if at:
                    self._take(said)
                elif said["calibration"] != calibration:
                    raise UserError(f"{journal.path}: begun with another calibration: delete it to start again")
            except DAMAGE:
                raise journal.damaged(at) from None
        self.resumed = len(self._kept)

    def _take(self, said: Any) -> None:
        metrics = {name: float(said["metrics"][name]) for name in (*METRICS, BYTES)}
        self._kept[Policy(**said["policy"]), int(said["window"])] = metrics

    def _bytes(self, metrics: WindowMetrics) -> float:
        assert metrics.copies is not None
        return float(metrics.copies @ self._expert_bytes) / len(metrics.kl)

    def points(self, policies: Sequence[Policy], what: str) -> list[Point]:
        """Each policy's point; only what is missing is run."""
        self._ran.check(policies)

        def skip(at: int, which: int) -> bool:
            return (policies[which], at) in self._kept

        work = self._ran.work(self._windows, policies, skip)
        if work:
            with self._watch(f"{what}, {len(policies)} policies", work, "tokens") as advance:
                for at, which, metrics in self._ran.divergences(self._windows, policies, skip, advance):
                    if not skip(at, which):
                        found = {**metrics.means(), BYTES: self._bytes(metrics)}
                        said = {"policy": asdict(policies[which]), "window": at, "metrics": found}
                        self._journal.add(said)
                        self._take(said)
        domains = [domain for domain, found in self._texts.items() for _ in found]
        return [
            point_of(
                policy,
                {
                    domain: [self._kept[policy, at] for at, of in enumerate(domains) if of == domain]
                    for domain in self._texts
                },
            )
            for policy in policies
        ]
