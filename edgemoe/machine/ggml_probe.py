"""The rate that an expert on the CPU really gets: ggml's own products, by type, buffer, and number of threads.

Decoding reaches part of what plain loads reach (seen: 33 GB/s raw, 20 to 37 with Q8_0 and repacked Q4_0, 12 to 17
with Q4_0 as it is in the file), because the kernel, and not only the memory, takes its time. Experts are chosen at
random among more of them than the caches hold. A round is the fastest of a few runs of milliseconds: a thread that
lost its core to somebody else meanwhile says nothing about this machine's memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.graph_run import CpuGraph
from edgemoe.llamacpp.layer_rest import Rest, add_attention, add_rest
from edgemoe.llamacpp.session import default_threads
from edgemoe.llamacpp.weights import PLAIN, buffer_types, random_rows, row_bytes, type_ids
from edgemoe.machine.caches import last_level_cache
from edgemoe.machine.memory import ram
from edgemoe.machine.product_cost import Timed, fit_cost
from edgemoe.machine.profile import ExpertRate, NodeCost
from edgemoe.machine.rounds import Effort, settle
from edgemoe.progress import Advance, no_progress
from edgemoe.units import format_bytes

# (row length, rows): from where a node is mostly overhead to where it is only bytes. The last one's rate is reported.
EXPERT_SHAPES = ((256, 256), (512, 2048), (2048, 768), (2048, 2048))
DENSE_SHAPES = ((512, 512), (512, 4096), (2048, 1024), (4096, 4096))
N_EXPERTS, TOP_K = 32, 8
RUNS = 3
# Layers without their products: width, expert width, heads, experts, top-k. Attention: cells, heads, KV heads, width.
NARROW, WIDE = (256, 128, 2, 16, 2), (4096, 1536, 32, 128, 8)
ATTENTION = (1024, 32, 4, 128)
_LAYERS = 12
_DISTINCT_ROWS = 64

FULL, QUICK = Effort(3, 7, 1.5), Effort(3, 3, 0.6)

ALL_TYPES = (
    *("F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_0", "Q4_0", "Q4_1", "Q5_1"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
QUICK_TYPES = ("F16", "Q8_0", "Q6_K", "Q4_K", "Q4_0", "MXFP4")
# Routers are kept in full precision, and only they (and norms) are: as experts it is not worth the time.
DENSE_ONLY = ("F32",)


@dataclass(frozen=True)
class ProductPlan:
    """Which products to measure. `both_states` adds the plain buffer where llama.cpp would repack.

    `working_set`: bytes of weights in each graph, four times the last-level cache unless given.
    """

    types: tuple[str, ...] = ALL_TYPES
    both_states: bool = True
    threads: tuple[int, ...] = field(default_factory=lambda: thread_counts(default_threads()))
    effort: Effort = FULL  # of each type and state
    working_set: int = field(default_factory=lambda: 4 * last_level_cache())

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.types if kind not in type_ids()]
        if unknown:
            raise UserError(f"{unknown[0]} is no type of this llama.cpp build: it has {', '.join(type_ids())}")
        if not self.types or not self.threads or min(self.threads) < 1 or self.working_set < 1:
            raise ValueError(f"nothing to measure in {self}")


def quick_plan() -> ProductPlan:
    """Common types, as llama.cpp keeps them by default, on all cores: a few seconds."""
    return ProductPlan(QUICK_TYPES, both_states=False, threads=(default_threads(),), effort=QUICK)


def thread_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, … and `most` itself."""
    return tuple(sorted({min(2**step, most) for step in range(most.bit_length() + 1)}))


@dataclass(frozen=True)
class Products:
    """What was measured; fields as in the machine profile."""

    experts: tuple[ExpertRate, ...]
    dense: tuple[ExpertRate, ...]
    nodes: tuple[NodeCost, ...]


@dataclass(frozen=True)
class _Kind:
    """One type in one state, as experts or dense."""

    type: str
    buffer: str
    expert: bool

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return EXPERT_SHAPES if self.expert else DENSE_SHAPES

    def ne(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return (*shape, N_EXPERTS) if self.expert else shape

    def row_count(self, shape: tuple[int, int]) -> int:
        """Rows of the weight that one product reads."""
        return shape[1] * (TOP_K if self.expert else 1)

    def read(self, shape: tuple[int, int]) -> int:
        """Bytes that one product reads."""
        return self.row_count(shape) * row_bytes(self.type, shape[0])


def n_rounds(plan: ProductPlan) -> int:
    """What `probe_products` counts its progress in."""
    cells = sum(len(kind.shapes) for kind in _kinds(plan)) * len(plan.threads)
    return (cells + 3 * len(plan.threads)) * plan.effort.most


def probe_products(plan: ProductPlan | None = None, advance: Advance = no_progress) -> Products:
    """Measure ggml's products; `advance` is told rounds, `n_rounds(plan)` in all.

    Raises `UserError` where memory is short, or llama.cpp is missing.
    """
    plan = plan or ProductPlan()
    need, free = len(EXPERT_SHAPES) * plan.working_set, ram().available
    if need > free:
        raise UserError(
            f"probing ggml's products needs {format_bytes(need)} of RAM, {format_bytes(free)} is free: "
            "close other programs"
        )
    found: dict[bool, list[ExpertRate]] = {True: [], False: []}
    for kind in _kinds(plan):
        found[kind.expert] += _measure(kind, plan, advance)
    return Products(tuple(found[True]), tuple(found[False]), _measure_nodes(plan, advance))


def _kinds(plan: ProductPlan) -> Iterator[_Kind]:
    for kind in (*plan.types, *(extra for extra in DENSE_ONLY if extra not in plan.types)):
        for expert in (True, False):
            if expert and kind in DENSE_ONLY and kind not in plan.types:
                continue
            shape = _Kind(kind, PLAIN, expert).ne(EXPERT_SHAPES[-1])
            states = buffer_types(kind, shape, TOP_K if expert else 0)
            for state in dict.fromkeys((states[0], PLAIN) if plan.both_states else states[:1]):
                yield _Kind(kind, state, expert)


def _measure(kind: _Kind, plan: ProductPlan, advance: Advance) -> list[ExpertRate]:
    """All shapes and numbers of threads in turn, so that they share whatever the machine is doing meanwhile."""
    with ExitStack() as graphs:
        cells = {}
        for shape in kind.shapes:
            run = _prepare(kind, shape, plan.working_set, graphs)
            cells.update({(shape, threads): partial(run, threads) for threads in plan.threads})
        rates = settle(cells, plan.effort, advance)
    results = []
    for threads in plan.threads:
        of_shape = {shape: rates[shape, threads] for shape in kind.shapes}
        timed = [
            Timed(kind.read(shape), kind.row_count(shape), kind.read(shape) / rate.median)
            for shape, rate in of_shape.items()
        ]
        largest = of_shape[kind.shapes[-1]]
        results.append(ExpertRate(kind.type, kind.buffer != PLAIN, threads, largest, fit_cost(timed)))
    return results


def _prepare(kind: _Kind, shape: tuple[int, int], working_set: int, graphs: ExitStack) -> Callable[[int], float]:
    """A graph of enough products of one shape; the result measures it: threads → bytes per second."""
    ne = kind.ne(shape)
    whole = kind.read(shape) // TOP_K * N_EXPERTS if kind.expert else kind.read(shape)
    count = max(2, -(-working_set // whole))
    graph = graphs.enter_context(CpuGraph(count))
    rows = random_rows(kind.type, _DISTINCT_ROWS, shape[0])
    for number in range(count):
        weight = graph.weight(kind.type, ne, rows)
        if kind.expert:
            # Gate and up share one input, down has one per expert: two to one, as in a layer.
            graph.expert_product(weight, TOP_K, shared_input=number % 3 < 2)
        else:
            graph.product(weight)
    graph.allocate(kind.buffer)
    rng = np.random.default_rng(count)

    def measure(threads: int) -> float:
        return count * kind.read(shape) / _fastest(graph, threads, rng, count if kind.expert else 0)

    return measure


def _fastest(graph: CpuGraph, threads: int, rng: np.random.Generator, n_choices: int = 0) -> float:
    times = []
    for _ in range(RUNS):
        if n_choices:
            graph.choose([rng.choice(N_EXPERTS, TOP_K, replace=False) for _ in range(n_choices)])
        times.append(graph.compute(threads))
    return min(times)


def _measure_nodes(plan: ProductPlan, advance: Advance) -> tuple[NodeCost, ...]:
    """Layers without their products, a narrow and a wide one, and attention alone: two equations and a third."""
    with ExitStack() as graphs:
        narrow, wide, attention = (graphs.enter_context(CpuGraph(1024)) for _ in range(3))
        rests = [_layers(narrow, NARROW), _layers(wide, WIDE)]
        attended = sum(add_attention(attention, *ATTENTION) for _ in range(_LAYERS))
        for graph in (narrow, wide, attention):
            graph.allocate()
        rng = np.random.default_rng(0)
        cells = {
            (number, threads): partial(_per_second, graph, threads, rng)
            for threads in plan.threads
            for number, graph in enumerate((narrow, wide, attention))
        }
        rates = settle(cells, replace(plan.effort, seconds=0.5 * len(plan.threads)), advance)
    costs = []
    for threads in plan.threads:
        seconds = [1 / rates[number, threads].median for number in range(3)]
        per_node, per_value = _solve(rests, seconds[:2])
        costs.append(NodeCost(threads, per_node, per_value, max(seconds[2] - _LAYERS * per_node, 0) / attended))
    return tuple(costs)


def _layers(graph: CpuGraph, shape: tuple[int, int, int, int, int]) -> Rest:
    return sum((add_rest(graph, *shape) for _ in range(_LAYERS)), Rest(0, 0))


def _per_second(graph: CpuGraph, threads: int, rng: np.random.Generator) -> float:
    return 1 / _fastest(graph, threads, rng)


def _solve(rests: Sequence[Rest], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds per node and per value. If noise makes the narrow layer dearer than the wide one, all is nodes."""
    (narrow, wide), (little, much) = rests, seconds
    per_value = (much - little * wide.nodes / narrow.nodes) / (wide.values - narrow.values * wide.nodes / narrow.nodes)
    per_value = max(per_value, 0.0)
    per_node = (little - per_value * narrow.values) / narrow.nodes
    return (per_node, per_value) if per_node > 0 else (little / narrow.nodes, 0.0)


def rates_of(experts: Sequence[ExpertRate], threads: int) -> dict[tuple[str, bool], ExpertRate]:
    """The rates measured with so many threads, or with the nearest number below (else above), by (type, repacked)."""
    counts = sorted({rate.threads for rate in experts})
    below = [count for count in counts if count <= threads]
    chosen = below[-1] if below else counts[0] if counts else 0
    return {(rate.type, rate.repacked): rate for rate in experts if rate.threads == chosen}
