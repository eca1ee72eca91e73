"""The prediction of a CPU decode is the sum that it says it is, and `verify` sets it beside llama.cpp."""

from dataclasses import replace
from pathlib import Path

import pytest

from edgemoe.errors import UserError
from edgemoe.llamacpp.layer_rest import Rest, attention_rest, moe_rest
from edgemoe.llamacpp.weights import PLAIN, buffer_types, row_bytes
from edgemoe.machine.identity import this_host
from edgemoe.machine.memory import Ram
from edgemoe.machine.profile import ExpertRate, NodeCost, ProductCost, Profile, RamRates, Rate, ThreadsRate
from edgemoe.machine.rounds import Effort
from edgemoe.model import Model, read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.wall import verify as verifying
from edgemoe.wall.cpu_costs import Costs, Kept, costs_of, without
from edgemoe.wall.cpu_decode import predict_cpu_decode
from edgemoe.wall.verify import n_rounds, verify

NODES = NodeCost(2, 1e-6, 1e-9, 1e-10)
COST = ProductCost(2e-6, 3e-9, 1e-10, 0.0)
L, E, K, D, F, V = 3, 8, 2, 256, 512, 512


def costs(**types: ProductCost) -> Costs:
    """The same cost in every state, for experts and dense weights."""
    kept = {
        Kept(kind, repacked, expert): cost
        for kind, cost in types.items()
        for repacked in (False, True)
        for expert in (False, True)
    }
    return Costs(2, kept, NODES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    shape = {"n_layers": L, "n_experts": E, "top_k": K, "d_model": D, "d_expert": F, "n_heads": 4, "n_kv_heads": 2}
    [path] = write_synthetic(
        tmp_path_factory.mktemp("wall") / "m.gguf",
        "qwen3moe",
        **shape,
        expert_type="Q4_K",
        dense_type="Q8_0",
        n_vocab=V,
    )
    return read_model(path)


def test_the_prediction_is_the_sum_of_its_parts(model: Model) -> None:
    expert, dense, router = ProductCost(5e-6, 1e-9, 2e-10, 0), COST, ProductCost(1e-6, 0, 1e-10, 0)
    found = predict_cpu_decode(model, costs(Q4_K=expert, Q8_0=dense, F32=router), n_ctx=100)
    parts = {charge.what: charge for charge in found.charges}

    gate = expert.seconds(K * F * row_bytes("Q4_K", D), K * F)
    down = expert.seconds(K * D * row_bytes("Q4_K", F), K * D)
    assert parts["routed experts"].seconds == pytest.approx(L * (2 * gate + down))
    assert parts["routed experts"].nbytes == model.geometry.active_expert_bytes

    def dense_seconds(rows: int) -> float:
        return dense.seconds(rows * row_bytes("Q8_0", D), rows)

    assert parts["attention"].seconds == pytest.approx(L * (2 * dense_seconds(D) + 2 * dense_seconds(D // 2)))
    assert parts["output"].seconds == pytest.approx(dense_seconds(V))
    assert parts["routers"].seconds == pytest.approx(L * router.seconds(4 * D * E, E))
    assert parts["KV cache"].seconds == pytest.approx(L * 2 * 100 * D * NODES.per_attention)
    assert parts["KV cache"].nbytes == 100 * L * 2 * 2 * D // 2
    rest = (attention_rest(D, D, D // 2) + moe_rest(D, F, E, K)) * L + Rest(4, 2 * D)
    assert parts["everything else"].seconds == pytest.approx(rest.nodes * 1e-6 + rest.values * 1e-9)
    assert found.seconds == pytest.approx(sum(charge.seconds for charge in found.charges))
    assert found.tokens_per_s == pytest.approx(1 / found.seconds)
    assert found.estimated == {}
    weights = model.geometry.active_bytes - model.geometry.embedding_bytes // V
    norms = sum(t.nbytes for t in model.tensors if len(t.shape) == 1)
    assert found.nbytes == weights - norms + parts["KV cache"].nbytes


def test_weights_cost_what_their_buffer_costs(model: Model) -> None:
    """A token is dearer by the plain buffer's price exactly where llama.cpp would have repacked."""
    table = dict(costs(Q4_K=COST, Q8_0=COST, F32=COST).products)
    table[Kept("Q4_K", False, True)] = ProductCost(0, 0, 1e-7, 0)
    both = Costs(2, table, NODES)
    repacked, plain = (predict_cpu_decode(model, both, 10, repack=repack).seconds for repack in (True, False))
    is_repacked = buffer_types("Q4_K", (D, F, E), K)[0] != PLAIN
    assert (plain > 5 * repacked) == is_repacked


def test_attention_grows_with_the_context_and_nothing_else_does(model: Model) -> None:
    short, long = (predict_cpu_decode(model, costs(Q4_K=COST, Q8_0=COST, F32=COST), n) for n in (10, 1010))
    assert long.seconds - short.seconds == pytest.approx(1000 * L * 2 * D * NODES.per_attention)


def test_tied_embeddings_are_multiplied_as_the_output(model: Model) -> None:
    tensors = tuple(tensor for tensor in model.tensors if tensor.name != "output.weight")
    tied = replace(model, tensors=tensors, geometry=replace(model.geometry, tied_output=True))
    table = costs(Q4_K=COST, Q8_0=COST, F32=COST)
    assert predict_cpu_decode(tied, table, 10).seconds == pytest.approx(predict_cpu_decode(model, table, 10).seconds)


def test_latent_attention_multiplies_the_latent_by_every_head(tmp_path: Path) -> None:
    [path] = write_synthetic(
        tmp_path / "m.gguf", "deepseek2", n_layers=2, d_model=128, n_heads=4, leading_dense=1, shared_experts=1
    )
    model = read_model(path)
    found = {charge.what: charge for charge in predict_cpu_decode(model, costs(F32=COST), 50).charges}
    rank = 32  # of the synthetic latent
    assert found["KV cache"].seconds == pytest.approx(2 * 2 * 50 * 4 * rank * NODES.per_attention)
    assert {"dense FFN", "shared experts"} <= set(found)


def test_a_type_that_was_not_measured_takes_its_time_per_weight_from_its_relatives() -> None:
    cheap, dear = ProductCost(1e-6, 1e-9, 1e-10, 0.0), ProductCost(3e-6, 3e-9, 2e-10, 0.0)
    table = costs(Q4_K=cheap, Q6_K=dear, Q8_0=ProductCost(9, 9, 9, 0))
    cost, sources = table.of(Kept("Q5_K", False, True))
    assert sources == ("Q4_K", "Q6_K")
    # 5.5 of 4.5 to 6.5625 bits: the share of the way, in time per weight.
    share = (5.5 - 4.5) / (6.5625 - 4.5)
    per_weight = (1 - share) * 1e-10 * 4.5 / 8 + share * 2e-10 * 6.5625 / 8
    assert cost.per_byte * 5.5 / 8 == pytest.approx(per_weight)
    assert cost.per_node == pytest.approx((1 - share) * 1e-6 + share * 3e-6)

    beyond, sources = table.of(Kept("Q3_K", False, True))
    assert sources == ("Q4_K",)
    assert beyond.per_byte * row_bytes("Q3_K", 256) == pytest.approx(cheap.per_byte * row_bytes("Q4_K", 256))
    assert table.of(Kept("Q5_0", True, False))[1] == ("Q8_0",), "its block length comes before its size"
    assert table.of(Kept("Q4_K", False, True)) == (cheap, ())


def test_estimates_are_named_and_impossible_ones_refused(model: Model) -> None:
    table = costs(Q4_K=COST, Q6_K=COST, Q8_0=COST, F32=COST)
    found = predict_cpu_decode(model, without(table, "Q4_K"), 10)
    assert found.estimated == {"Q4_K": ("Q6_K",)}
    with pytest.raises(UserError, match="no rate for IQ2_XS, nor for a type like it: run `edgemoe probe`"):
        table.of(Kept("IQ2_XS", False, True))
    with pytest.raises(UserError, match=r"no type of this llama.cpp build"):
        table.of(Kept("Q9_9", False, True))
    with pytest.raises(UserError, match=r"llama.cpp runs GGUF files, this is safetensors"):
        predict_cpu_decode(replace(model, format="safetensors"), table, 10)


RATE = Rate(1e10, 0.0, 3, True)


def profile(*threads: int) -> Profile:
    rates = tuple(
        ExpertRate(kind, repacked, count, RATE, COST)
        for count in threads
        for kind in ("Q4_K", "Q8_0", "F32")
        for repacked in (False, True)
    )
    ram = RamRates(1, 1, (ThreadsRate(1, RATE),), (ThreadsRate(1, RATE),))
    nodes = tuple(NodeCost(count, 1e-6, 0.0, 1e-10) for count in threads)
    return Profile(this_host(), "now", ram, cpu_experts=rates, cpu_dense=rates, cpu_nodes=nodes)


@pytest.mark.parametrize(("asked", "used"), [(1, 1), (2, 2), (3, 2), (4, 4), (64, 8)])
def test_the_nearest_number_of_threads_below_counts(asked: int, used: int) -> None:
    assert costs_of(profile(1, 2, 4, 8), asked).threads == used
    assert costs_of(profile(4), 1).threads == 4


def test_a_profile_without_costs_is_refused() -> None:
    with pytest.raises(UserError, match="no costs of ggml's products: run `edgemoe probe` again"):
        costs_of(replace(profile(1), cpu_nodes=()), 1)


def test_verify_measures_what_it_predicts(model: Model) -> None:
    told: list[int] = []
    effort = Effort(2, 2, 30)
    found = verify(model, profile(1), 1, effort, told.append)
    assert sum(told) == n_rounds(effort)
    assert found.measured.rounds == 2 and found.measured.median > 1
    assert found.error == pytest.approx(found.predicted.tokens_per_s / found.measured.median - 1)
    assert found.drift > 0 and "Q4_K" in found.reference
    assert (1 + found.error_now) == pytest.approx((1 + found.error) * found.drift)
    assert found.bytes_per_s == pytest.approx(found.predicted.nbytes * found.measured.median)


def test_a_model_that_does_not_fit_is_not_the_resident_case(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "ram", lambda: Ram(10**6, 10**6, True))
    with pytest.raises(UserError, match=r"--verify is for models that fit: it needs .* of RAM, 1\.00 MB is free"):
        verify(model, profile(1), 1)
