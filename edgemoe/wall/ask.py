"""From a question in words to an answer: the one function behind `edgemoe wall`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.errors import UserError
from edgemoe.model import Model, read_model
from edgemoe.model.geometry import ModelGeometry
from edgemoe.model.memory import DEFAULT_CONTEXT, memory_needs
from edgemoe.policy import PRESETS
from edgemoe.wall.batch import batch, parse_batches
from edgemoe.wall.ceiling import ceiling
from edgemoe.wall.hits import load_hits
from edgemoe.wall.paths import paths
from edgemoe.wall.plan import Plan, compare, make_plan, save_plan
from edgemoe.wall.presets import PUBLISHED, is_preset, preset_geometry
from edgemoe.wall.rates import NO_PROFILE, find_profile, machine_from, parse_share
from edgemoe.wall.report import Answer
from edgemoe.wall.tiers import Room, Wall, best

if TYPE_CHECKING:
    from edgemoe.machine.profile import Profile


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
    n_ctx: int | None = None  # by default 4,096, or all that the model was trained for
    profile: str | None = None
    rates: dict[str, str] = field(default_factory=dict)  # by tier
    plan: Path | None = None
    verify: bool = False  # only checked here; the measurement is `edgemoe.wall.verify`


def ask(question: Question, room_of: Callable[[Model, str, int], Room] | None = None) -> Answer:
    """The answer. Everything wrong with the question is a `UserError`, before any work is done.

    room_of: what the program that will run it makes of RAM, by the model's file, the policy's name and the context;
    `edgemoe wall` gives that of `edgemoe run`. Without it, and for presets, the tiers' least needs are counted.
    """
    model = find_model(question.model)
    g, files = (model.geometry, model.files) if model else (preset_geometry(question.model), ())
    _check(question, g)
    if question.verify and (model is None or question.profile == NO_PROFILE):
        raise UserError("--verify measures on this machine: give it a GGUF file and the machine's own profile")
    n_ctx = question.n_ctx or min(DEFAULT_CONTEXT, g.n_ctx or DEFAULT_CONTEXT)
    sizes = parse_batches(question.batches) if question.batches else []
    rate = parse_share("--hit-rate", question.hit_rate) if question.hit_rate else None
    profile = find_profile(question.profile, question.rates, files[0] if files else None)
    machine = machine_from(g, profile, question.rates, question.ram, question.vram)
    wall = Wall.of_one(g, machine, load_hits(g, files, question.traces, question.policy, rate), n_ctx)
    notes: list[str] = []
    if model and profile:
        wall, notes = _with_products(wall, model, profile)
    if model and room_of and model.format == "GGUF" and g.is_moe:
        wall = replace(wall, room=room_of(model, question.policy, n_ctx))
    if question.policy in PRESETS and PRESETS[question.policy].routing != "exact":
        notes.append(f"{question.policy} steers routing: it executes other experts than the model's router at times")
    ways = tuple(paths(wall))
    path, texts = best(ways), wall.caching.texts
    plan = _plan(wall, files, question.plan) if question.plan else None
    budget = sum(_expert_budgets(wall))
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
        model=model,
        profile=profile,
    )


def find_model(text: str) -> Model | None:
    """The model on disk; None where the text names a preset. A `UserError` for neither."""
    if is_preset(text) and not Path(text).exists():
        return None
    if not Path(text).exists():
        raise UserError(f"{text}: no such file, and no preset: there are {', '.join(PUBLISHED)}")
    return read_model(text)


def _with_products(wall: Wall, model: Model, profile: "Profile") -> tuple[Wall, list[str]]:
    """The wall with what the CPU pays besides bytes, where the profile knows the cost of ggml's products."""
    from edgemoe.llamacpp.session import default_threads
    from edgemoe.wall.cpu_costs import costs_of
    from edgemoe.wall.cpu_decode import predict_cpu_decode

    weights, cpu = wall.machine.weights, wall.machine.cpu
    if model.format != "GGUF" or weights is None or cpu is None:
        return wall, []
    try:
        predicted = predict_cpu_decode(model, costs_of(profile, default_threads()), wall.n_ctx)
    except UserError as reason:
        return wall, [f"on the CPU only bytes are counted ({reason})"]
    bytes_alone = wall.fixed / weights.low + wall.routed[1] / cpu.low
    note = f"the CPU alone, by the cost of every product: {predicted.tokens_per_s:,.3g} tok/s"
    return replace(wall, cpu_extra=max(predicted.seconds - bytes_alone, 0.0)), [note]


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
    if question.n_ctx is not None and question.n_ctx > g.n_ctx > 0:
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
    if wall.room:
        return 0, wall.room.for_pins(machine.ram_bytes)
    without = needs["ssd-to-ram"].ram - g.active_expert_bytes
    return 0, max(machine.ram_bytes - without, 0)


def _plan(wall: Wall, files: Sequence[Path], out: Path) -> Plan:
    vram, ram = _expert_budgets(wall)
    if not vram and not ram:
        raise UserError("--plan: no memory is left for experts after the other weights: give a larger --ram or --vram")
    plan = make_plan(wall.geometry, files, wall.caching.texts, vram, ram)
    save_plan(plan, out)
    return plan
