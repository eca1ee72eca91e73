"""The rate that an expert on the CPU really gets: ggml's own products, by type, buffer, and number of threads.

Decoding reaches part of what plain loads reach (seen: 33 GB/s raw, 20 to 37 with Q8_0 and repacked Q4_0, 12 to 17
with Q4_0 as it is in the file), because the kernel, and not only the memory, takes its time. Experts are chosen at
random among more of them than the caches hold. A round lasts about as long as a token does, so that it holds as much
of whatever disturbs this machine; the fastest of shorter ones would promise what no token gets (7% were seen).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import numpy as np

from edgemoe.errors import UserError
from edgemoe.llamacpp.graph_run import CpuGraph, Weights
from edgemoe.llamacpp.layer_rest import GAPS, LayerShape, add_attention, add_rest
from edgemoe.llamacpp.session import default_threads
from edgemoe.llamacpp.weights import PLAIN, buffer_types, row_bytes, type_ids
from edgemoe.machine.caches import last_level_cache
from edgemoe.machine.memory import ram
from edgemoe.machine.product_cost import Timed, fit_cost
from edgemoe.machine.profile import ExpertRate, NodeCost
from edgemoe.machine.rounds import Effort, settle
from edgemoe.progress import Advance, no_progress
from edgemoe.units import format_bytes

# (row length, rows): from where a node is mostly overhead to where it is only bytes. The last one's rate is reported.
EXPERT_SHAPES = ((256, 256), (512, 2048), (1024, 512), (2048, 1024))
DENSE_SHAPES = ((512, 512), (512, 4096), (2048, 1024), (4096, 4096))
N_EXPERTS, TOP_K = 32, 8
_WHOLE = (*EXPERT_SHAPES[-1], N_EXPERTS)
ROUND_S = 0.012
_MAX_RUNS = 8
TYPICAL = LayerShape(2048, 768, 16, 64, 8)
_SHAPES = {"narrow": LayerShape(512, 128, 4, 32, 8), "wide": LayerShape(4096, 1536, 32, 128, 8)}
_LEAST_NODE_S = 1e-7
ATTENTION = (1024, 32, 4, 128)  # cells, heads, KV heads, width of a head
_LAYERS = 6
_BETWEEN, _BETWEEN_SHAPE = "Q8_0", (2048, 2048)
_SHARE_OF_FREE = 0.6
_MAX_NODES = 1024  # of one shape: tiny products need not cover all weights, no cache keeps them until the next run
_MAX_PARTS = 8 * _MAX_NODES

FULL, QUICK = Effort(5, 9, 90), Effort(3, 5, 6)

ALL_TYPES = (
    *("F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_0", "Q4_0", "Q4_1", "Q5_1"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XS", "MXFP4"),
)
# Enough that every other type has a relative among them, kept in the same way.
QUICK_TYPES = ("F16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "MXFP4")
# Routers are kept in full precision, and only they (and norms) are: as experts it is not worth the time.
DENSE_ONLY = ("F32",)


@dataclass(frozen=True)
class ProductPlan:
    """Which products to measure. `both_states` adds the plain buffer where llama.cpp would repack.

    `working_set`: bytes of weights of each type, four times the last-level cache unless given.
    """

    types: tuple[str, ...] = ALL_TYPES
    both_states: bool = True
    threads: tuple[int, ...] = field(default_factory=lambda: thread_counts(default_threads()))
    effort: Effort = FULL
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
    def stored(self) -> tuple[str, str]:
        """What it shares its weights with."""
        return self.type, self.buffer

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
    return (cells + len(plan.threads)) * plan.effort.most


def probe_products(plan: ProductPlan | None = None, advance: Advance = no_progress) -> Products:
    """Measure ggml's products; `advance` is told rounds, `n_rounds(plan)` in all.

    Raises `UserError` where memory is short, or llama.cpp is missing.
    """
    plan = plan or ProductPlan()
    found: dict[bool, list[ExpertRate]] = {True: [], False: []}
    batches = list(_batches(plan))
    effort = replace(plan.effort, seconds=plan.effort.seconds / len(batches))
    for batch in batches:
        for kind, rate in _measure(batch, replace(plan, effort=effort), advance):
            found[kind.expert].append(rate)
    return Products(tuple(found[True]), tuple(found[False]), _measure_nodes(plan, advance))


@contextmanager
def again(rate: ExpertRate, expert: bool) -> Iterator[Callable[[], float]]:
    """Measure a rate of a profile again, as it was measured: bytes per second, whenever it is called.

    Virtual machines and laptops give more in one minute than in the next; this tells how much of that there is.
    """
    buffers = [name for name in buffer_types(rate.type, _WHOLE, TOP_K) if (name != PLAIN) == rate.repacked]
    if not buffers:
        raise UserError(f"this llama.cpp keeps {rate.type} otherwise than the profile says: run `edgemoe probe` again")
    kind = _Kind(rate.type, buffers[0], expert)
    size = max(4 * last_level_cache(), _largest(rate.type))
    with ExitStack() as stack:
        weights = stack.enter_context(Weights(rate.type, size, kind.buffer, _MAX_PARTS))
        yield partial(_prepare(kind, kind.shapes[-1], weights, stack), rate.threads)


def _kinds(plan: ProductPlan) -> Iterator[_Kind]:
    for kind in (*plan.types, *(extra for extra in DENSE_ONLY if extra not in plan.types)):
        for expert in (True, False):
            if expert and kind in DENSE_ONLY and kind not in plan.types:
                continue
            states = buffer_types(kind, _Kind(kind, PLAIN, expert).ne(EXPERT_SHAPES[-1]), TOP_K if expert else 0)
            for state in dict.fromkeys((states[0], PLAIN) if plan.both_states else states[:1]):
                yield _Kind(kind, state, expert)


def _batches(plan: ProductPlan) -> Iterator[list[_Kind]]:
    """Kinds whose weights fit into free RAM together: all of them, unless caches are huge or RAM is short."""
    free = ram().available
    fit = int(_SHARE_OF_FREE * free) // plan.working_set
    if not fit:
        raise UserError(
            f"probing ggml's products takes {format_bytes(plan.working_set)} of weights, and {format_bytes(free)} of "
            "RAM are free: close other programs"
        )
    kinds = list(_kinds(plan))
    stored = list(dict.fromkeys(kind.stored for kind in kinds))
    for first in range(0, len(stored), fit):
        yield [kind for kind in kinds if kind.stored in stored[first : first + fit]]


def _measure(kinds: Sequence[_Kind], plan: ProductPlan, advance: Advance) -> Iterator[tuple[_Kind, ExpertRate]]:
    """All kinds, shapes and numbers of threads in turn: whatever the machine does meanwhile, it does to all alike."""
    with ExitStack() as stack:
        weights = {
            stored: stack.enter_context(
                Weights(stored[0], max(plan.working_set, _largest(stored[0])), stored[1], _MAX_PARTS)
            )
            for stored in dict.fromkeys(kind.stored for kind in kinds)
        }
        cells = {}
        for kind in kinds:
            for shape in kind.shapes:
                run = _prepare(kind, shape, weights[kind.stored], stack)
                cells.update({(kind, shape, threads): partial(run, threads) for threads in plan.threads})
        rates = settle(cells, plan.effort, advance)
    for kind in kinds:
        for threads in plan.threads:
            of_shape = {shape: rates[kind, shape, threads] for shape in kind.shapes}
            timed = [
                Timed(kind.read(shape), kind.row_count(shape), kind.read(shape) / rate.median)
                for shape, rate in of_shape.items()
            ]
            largest = of_shape[kind.shapes[-1]]
            yield kind, ExpertRate(kind.type, kind.buffer != PLAIN, threads, largest, fit_cost(timed))


def _largest(kind: str) -> int:
    """Bytes of the largest set of experts, which has to fit into the weights."""
    return max(N_EXPERTS * rows * row_bytes(kind, length) for length, rows in EXPERT_SHAPES)


def _prepare(kind: _Kind, shape: tuple[int, int], weights: Weights, stack: ExitStack) -> Callable[[int], float]:
    """A graph of products of one shape that covers the weights; the result measures it: threads → bytes per second."""
    graph = stack.enter_context(CpuGraph(_MAX_NODES))
    count = _add_experts(graph, kind, shape, weights) if kind.expert else _add_dense(graph, kind, shape, weights)

    def measure(threads: int) -> float:
        return count * kind.read(shape) / _seconds(graph, threads)

    return measure


def _add_dense(graph: CpuGraph, kind: _Kind, shape: tuple[int, int], weights: Weights) -> int:
    count = min(max(1, weights.nbytes // kind.read(shape)), _MAX_NODES)
    for _ in range(count):
        graph.product(weights.part(*shape))
    graph.allocate()
    return count


def _add_experts(graph: CpuGraph, kind: _Kind, shape: tuple[int, int], weights: Weights) -> int:
    """Products that execute every expert once, in random order: by the time that it comes again, no cache has it."""
    hands = N_EXPERTS // TOP_K
    stacks = min(max(1, weights.nbytes // (hands * kind.read(shape))), _MAX_NODES // hands)
    rng, chosen = np.random.default_rng(stacks), []
    for _ in range(stacks):
        stacked = weights.part(*kind.ne(shape))
        chosen += list(rng.permutation(N_EXPERTS).reshape(hands, TOP_K))
        for number in range(hands):
            # Gate and up share one input, down has one per expert: about two to one, as in a layer.
            graph.expert_product(stacked, TOP_K, shared_input=number % 3 < 2)
    graph.allocate()
    graph.choose(chosen)
    return stacks * hands


def _seconds(graph: CpuGraph, threads: int) -> float:
    """Seconds per run: the mean over a round."""
    total, count = 0.0, 0
    while total < ROUND_S and count < _MAX_RUNS:
        total += graph.compute(threads)
        count += 1
    return total / count


def _measure_nodes(plan: ProductPlan, advance: Advance) -> tuple[NodeCost, ...]:
    """What values cost, from layers without products, narrow and wide; nodes, from layers with products between.

    By themselves nodes would seem three times as fast: between products their data has left the caches, and the product
    after them has to get the memory going again. So layers are timed with their products, less the products alone.
    """
    with ExitStack() as stack:
        weights = stack.enter_context(Weights(_BETWEEN, plan.working_set))
        names = ("products", "layers", "narrow", "wide", "attention")
        graphs = {name: stack.enter_context(CpuGraph(1024)) for name in names}

        def product(name: str) -> None:
            graphs[name].product(weights.part(*_BETWEEN_SHAPE))

        for _ in range(GAPS * _LAYERS):
            product("products")
        rest = add_rest(graphs["layers"], _LAYERS, TYPICAL, partial(product, "layers"))
        narrow, wide = (add_rest(graphs[name], _LAYERS, _SHAPES[name], lambda: None) for name in ("narrow", "wide"))
        attended = sum(add_attention(graphs["attention"], *ATTENTION) for _ in range(_LAYERS))
        for graph in graphs.values():
            graph.allocate()
        costs = []
        for threads in plan.threads:
            seconds = _together(graphs, threads, plan.effort.most, advance)
            per_value = max(seconds["wide"] - seconds["narrow"], 0.0) / (wide.values - narrow.values)
            # However noisy: a node costs no less than by itself.
            least = max(seconds["narrow"] - per_value * narrow.values, _LEAST_NODE_S * narrow.nodes) / narrow.nodes
            between = (seconds["layers"] - seconds["products"] - per_value * rest.values) / rest.nodes
            costs.append(NodeCost(threads, max(between, least), per_value, seconds["attention"] / attended))
    return tuple(costs)


def _together(graphs: Mapping[str, CpuGraph], threads: int, rounds: int, advance: Advance) -> dict[str, float]:
    """Median seconds of each graph, all run in turn; of layers, as their median difference from the products says."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(2 * rounds):
        for name, graph in graphs.items():
            times[name].append(_seconds(graph, threads))
    advance(rounds)
    seconds = {name: median(of) for name, of in times.items()}
    gaps = [layers - products for layers, products in zip(times["layers"], times["products"], strict=True)]
    seconds["layers"] = seconds["products"] + median(gaps)
    return seconds
