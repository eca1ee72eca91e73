"""`n_gpu_layers` with streamed experts, as far as it can be seen without a GPU: what llama.cpp is asked for."""

import numpy as np
import pytest

from edgemoe.demo import demo_model
from edgemoe.errors import UserError
from edgemoe.llamacpp.libraries import llama
from edgemoe.llamacpp.reserve import SkeletonSession
from edgemoe.policy import preset
from edgemoe.streaming.engine import StreamingEngine
from edgemoe.units import Residency

OPTIONS = {"residency": Residency.parse("16"), "n_ctx": 64, "n_threads": 1}


@pytest.mark.skipif(llama().llama_supports_gpu_offload(), reason="this llama.cpp has GPU support")
def test_without_gpu_support_it_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"this llama\.cpp build has no GPU support: leave out --n-gpu-layers"):
        StreamingEngine(demo_model(), n_gpu_layers=1, **OPTIONS)


def test_layers_are_offloaded_and_experts_stay(monkeypatch):
    """The experts' buffer type is named before anything is loaded, and work is not offloaded; without a device, the
    layers stay where they are and the logits are the same."""
    asked = []
    params = SkeletonSession._model_params
    monkeypatch.setattr(SkeletonSession, "_model_params", lambda self, n: asked.append(params(self, n)) or asked[-1])
    contexts = SkeletonSession._context_params
    monkeypatch.setattr(SkeletonSession, "_context_params", lambda self: asked.append(contexts(self)) or asked[-1])
    for module in ("session", "resident"):
        monkeypatch.setattr(f"edgemoe.llamacpp.{module}.check_gpu", lambda _: None, raising=False)
    monkeypatch.setattr("edgemoe.streaming.fitting.check_gpu", lambda _: None)
    logits = []
    for layers in (0, 5):
        with StreamingEngine(demo_model(), policy=preset("psr"), n_gpu_layers=layers, **OPTIONS) as engine:
            logits.append(engine.prefill(engine.tokenize(b"In the beginning God created")))
    assert np.array_equal(*logits)
    assert [found.n_gpu_layers for found in asked[::2]] == [0, 5]
    assert all(found.tensor_buft_overrides and not found.use_extra_bufts for found in asked[::2])
    assert not any(found.op_offload for found in asked[1::2]) and all(found.offload_kqv for found in asked[1::2])
