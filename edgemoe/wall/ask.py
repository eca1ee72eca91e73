"""From a question in words to an answer: the one function behind `edgemoe wall`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgemoe.errors import UserError
from edgemoe.model import read_model
from edgemoe.model.geometry import ModelGeometry
from edgemoe.model.memory import memory_needs
from edgemoe.wall.batch import batch, parse_batches
from edgemoe.wall.ceiling import ceiling
from edgemoe.wall.hits import load_hits
from edgemoe.wall.paths import paths
from edgemoe.wall.plan import Plan, compare, make_plan, save_plan
from edgemoe.wall.presets import PUBLISHED, is_preset, preset_geometry
from edgemoe.wall.rates import find_profile, machine_from, parse_share
from edgemoe.wall.report import Answer
from edgemoe.wall.tiers import Wall, best


@dataclass(frozen=True)
class Question:
    """What a person asks, as written on the command line."""

    model: str
    ram: str | None = None
    vram: str | None = None
    traces: Sequence[Path] = ()
    policy: str = "lru"
    hit_rate: str | None = None
    batches: str | None = None
    target: float | None = None
    n_ctx: int = 4096
    profile: str | None = None
    rates: dict[str, str] = field(default_factory=dict)  # by tier
    plan: Path | None = None


def ask(question: Question) -> Answer:
    """The answer. Everything wrong with the question is a `UserError`, before any work is done."""
    g, files = find_model(question.model)
    _check(question, g)
    sizes = parse_batches(question.batches) if question.batches else []
    rate = parse_share("--hit-rate", question.hit_rate) if question.hit_rate else None
    profile = find_profile(question.profile, question.rates, files[0] if files else None)
    machine = machine_from(g, profile, question.rates, question.ram, question.vram)
    wall = Wall.of_one(g, machine, load_hits(g, files, question.traces, question.policy, rate), question.n_ctx)
    ways = tuple(paths(wall))
    path, texts = best(ways), wall.caching.texts
    plan = _plan(wall, files, question.plan) if question.plan else None
    budget = sum(_expert_budgets(wall))
    notes = []
    if profile and profile.unstable:
        notes.append("some rates of the profile had not settled: run `edgemoe probe` again on an idle machine")
    return Answer(
        wall=wall,
        ways=ways,
        best=path,
        ceiling=ceiling(wall, path, question.target) if path and question.target else None,
        batches=tuple(batch(wall, size) for size in sizes),
        residency=tuple(compare(g, texts, budget)) if texts and 0 < budget < g.routed_bytes else (),
        plan=plan,
        notes=tuple(notes),
    )


def find_model(text: str) -> tuple[ModelGeometry, tuple[Path, ...]]:
    """Geometry and files of a model on disk, or of a preset (which has no files)."""
    if is_preset(text) and not Path(text).exists():
        return preset_geometry(text), ()
    if not Path(text).exists():
        raise UserError(f"{text}: no such file, and no preset: there are {', '.join(PUBLISHED)}")
    model = read_model(text)
    return model.geometry, model.files


def _check(question: Question, g: ModelGeometry) -> None:
    target = question.target
    if target is not None and not 0 < target < 1e6:
        raise UserError(f"--target {target:g}: expected tokens per second above 0, like 10")
    if question.plan and not question.traces:
        raise UserError("--plan places experts by their heat: give the --trace to take it from")
    if not g.is_moe and (question.traces or question.plan or question.hit_rate):
        raise UserError(
            f"{question.model}: a dense model has no experts to cache: leave out --trace, --hit-rate, --plan"
        )
    if question.n_ctx > g.n_ctx > 0:
        raise UserError(f"--ctx {question.n_ctx}: this model was trained for {g.n_ctx:,} tokens of context")


def _expert_budgets(wall: Wall) -> tuple[int, int]:
    """Bytes for experts in VRAM and in RAM, after everything else has its place: in VRAM if it fits, else in RAM."""
    g, machine = wall.geometry, wall.machine
    if not g.is_moe:
        return 0, 0
    needs = {need.way: need for need in memory_needs(g, wall.n_ctx)}
    beside = machine.vram_bytes - needs["experts-in-ram"].vram
    if beside >= 0:
        return beside, max(machine.ram_bytes - g.embedding_bytes, 0)
    without = needs["ssd-to-ram"].ram - g.active_expert_bytes
    return 0, max(machine.ram_bytes - without, 0)


def _plan(wall: Wall, files: Sequence[Path], out: Path) -> Plan:
    vram, ram = _expert_budgets(wall)
    if not vram and not ram:
        raise UserError("--plan: no memory is left for experts after the other weights: give a larger --ram or --vram")
    plan = make_plan(wall.geometry, files, wall.caching.texts, vram, ram)
    save_plan(plan, out)
    return plan
