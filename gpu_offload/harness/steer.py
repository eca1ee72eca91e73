"""`steer`: a Hugging Face MoE model whose experts are chosen by a `Policy` (PSR paper §5, Appendix A).

    with steer(model, preset("psr"), capacity=32, calibration=calibration) as steered:
        text = model.generate(**inputs)
        records = steered.take()

The routers' choice is replaced, nothing else: mixing weights stay those of the unmodified router. State is carried from
step to step of a request and reset by the next one; a forward pass that starts without a KV cache, or with an empty
one, starts a request. Each batch row has a logical cache of its own, and padding (attention_mask 0) does not touch it.
"""

import inspect
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgemoe import __version__
from edgemoe.calibration import Calibration
from edgemoe.errors import UserError
from edgemoe.gpu_offload.harness.families import find_routers
from edgemoe.gpu_offload.harness.identity import config_hash, fingerprint, numerics
from edgemoe.gpu_offload.harness.record import Level, Record, Recorder
from edgemoe.policy import LogicalCache, Policy
from edgemoe.policy.block import CacheRows

_STEERED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def steer(
    model: nn.Module,
    policy: Policy,
    capacity: int,
    calibration: Calibration | None = None,
    record: Level | None = None,
) -> "Steered":
    """A context in which `model` routes by `policy` on a logical cache of `capacity` slots per layer.

    record: what `take()` gives of every request: "counts", "decisions" or "scores"; None keeps totals only.

    Raises `UserError` for a model without a supported MoE block, a policy that does not fit it, a missing Δ̄, or a
    calibration of another geometry.
    """
    return Steered(model, policy, capacity, calibration, record)


class Steered:
    """A model under a policy. Entering installs the hooks, leaving removes them; the state stays and may go on."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        capacity: int,
        calibration: Calibration | None,
        record: Level | None,
    ) -> None:
        self.model, self.policy, self.capacity, self.calibration = model, policy, capacity, calibration
        self.routers = find_routers(model)
        self._check(policy, calibration)
        first = self.routers[0]
        self._rows = CacheRows(
            LogicalCache(
                policy,
                n_layers=len(self.routers),
                n_experts=first.n_experts,
                top_k=[router.top_k for router in self.routers],
                capacity=capacity,
                delta=None if calibration is None else calibration.delta,
                warm=None if calibration is None else calibration.warm,
            )
        )
        self._recorder = None if record is None else Recorder(record)
        self._wants_pregate = policy.needs_pregate or record == "scores"
        self._names = [name for name in inspect.signature(model.forward).parameters if name != "kwargs"]
        self._handles: list[Any] = []
        self._seen = 0
        self._valid: np.ndarray | None = None  # [B, S] of the running pass
        self._prior: tuple[np.ndarray, np.ndarray] | None = None  # [U, L, E] and [B·S] rows of it
        self._pregates: dict[int, np.ndarray] = {}
        self._kv: Any = None
        self._id: str | None = None
        self.tokens = 0
        """Tokens routed so far, padding left out."""
        self.totals = np.zeros(5, np.int64)
        """Sums over tokens and layers, by the names in `edgemoe.policy.replay`."""

    def _check(self, policy: Policy, calibration: Calibration | None) -> None:
        kind, first = self.model.config.model_type, self.routers[0]
        if not first.family.ranks_logits and (policy.routing == "tau" or policy.elide):
            what = "tau routing" if policy.routing == "tau" else "gate elision"
            raise UserError(f"{what} needs logits, a {kind} model ranks sigmoids: use another policy")
        if calibration is None:
            return
        layers = [router.layer for router in self.routers]
        if calibration.layers.tolist() != layers or calibration.n_experts != first.n_experts:
            raise UserError(
                f"a calibration of {len(calibration.layers)} layers of {calibration.n_experts} experts "
                f"({calibration.model}), the model routes in {len(layers)} of {first.n_experts}: calibrate this model"
            )

    def feeds(self, at: int) -> bool:
        """Whether router `at` gives the next one its pre-gate: not where a dense layer, or nothing, comes next."""
        return at + 1 < len(self.routers) and self.routers[at + 1].layer == self.routers[at].layer + 1

    @property
    def fingerprint(self) -> str:
        """The model's, in place of a GGUF header's SHA-256."""
        if self._id is None:
            self._id = fingerprint(self.model, self.routers)
        return self._id

    def configuration(self, **run: Any) -> dict[str, Any]:
        """All that decides a result, with its `config_hash`. run: chunk, batch and whatever else the caller decides."""
        decides = {
            **numerics(self.model),
            "model": self.fingerprint,
            "policy": str(self.policy),
            "policy_hash": self.policy.hash,
            "slots": self.capacity,
            "calibration": "" if self.calibration is None else self.calibration.digest,
            **run,
        }
        return {**decides, "config_hash": config_hash(decides)}

    def provenance(self, **run: Any) -> dict[str, Any]:
        """The `meta` of a trace of this model, and the ids of its MoE layers under `layers`."""
        name = str(getattr(self.model.config, "_name_or_path", "") or self.model.config.model_type)
        top_k = [router.top_k for router in self.routers]
        return {
            "model": name.rstrip("/").rpartition("/")[2],
            "top_k": max(top_k),
            "k": max(top_k),
            "num_experts": self.routers[0].n_experts,
            "n_moe_layers": len(self.routers),
            "source": f"edgemoe {__version__} quality harness (transformers, weights untouched)",
            "layer_top_k": top_k,
            "architecture": self.model.config.model_type,
            "header_sha256": [self.fingerprint],
            "steered": self.policy.routing != "exact" or self.policy.elide > 0,
            "run": self.configuration(**run),
            "layers": [router.layer for router in self.routers],
        }

    def take(self) -> list[Record]:
        """The records since the last call, one per request and batch row; needs `record`."""
        if self._recorder is None:
            raise ValueError('nothing is recorded: steer with record="counts", "decisions" or "scores"')
        self._abandon()
        return self._recorder.take()

    def __enter__(self) -> "Steered":
        if self.model in _STEERED:
            raise RuntimeError("the model is steered already: leave that context first")
        _STEERED.add(self.model)
        hook = self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._handles = [hook, self.model.register_forward_hook(self._end, with_kwargs=True)]
        for at, router in enumerate(self.routers):
            self._handles.append(router.gate.register_forward_hook(self._hook(at), prepend=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._watch(None)
        _STEERED.discard(self.model)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Before a forward pass: whose tokens these are, and whether a request starts."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        ids = given.get("input_ids")
        shape = tuple((ids if ids is not None else given["inputs_embeds"]).shape[:2])
        valid = _valid(given.get("attention_mask"), shape)
        self._abandon()
        kv = given.get("cache", given.get("past_key_values"))
        past = 0 if kv is None else int(kv.get_seq_length())
        if past == 0:
            self._rows.reset(shape[0])
            if self._recorder is not None:
                self._recorder.start()
        elif past != self._seen or shape[0] != len(self._rows):
            raise UserError(
                f"the KV cache holds {past} positions of {shape[0]} rows, the routing state {max(self._seen, 0)} of "
                f"{len(self._rows)}: a request goes on where it stopped, without assistants"
            )
        self._seen, self._valid = -1, valid
        self._watch(kv)
        tokens = np.full(shape, -1, np.int32) if ids is None else ids.detach().cpu().numpy().astype(np.int32)
        if self._recorder is not None:
            self._recorder.step(tokens, valid)
        self._prior = self._prior_of(tokens)
        self._pregates.clear()

    def _watch(self, kv: Any) -> None:
        """Refuse beam search, which exchanges the rows of the KV cache between steps."""
        if self._kv is not None:
            vars(self._kv).pop("reorder_cache", None)
        if kv is not None:
            kv.reorder_cache = _no_beams
        self._kv = kv

    def _abandon(self) -> None:
        """Forget a pass that did not end."""
        if self._valid is not None and self._recorder is not None:
            self._recorder.drop_step()
        self._valid = None

    def _prior_of(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        if self.calibration is None or not self.policy.uses_prior:
            return None
        ids, which = np.unique(tokens, return_inverse=True)
        return np.stack([self.calibration.prior_row(int(token)) for token in ids]), which.reshape(-1)

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG002
        assert self._valid is not None
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        kv = given.get("cache", given.get("past_key_values"))
        self.tokens += int(self._valid.sum())
        length, self._valid = self._valid.shape[1], None
        # A cache that the pass was given has grown; one that it made is as long as the pass.
        self._seen = length if kv is None else int(kv.get_seq_length())

    def _hook(self, at: int) -> Callable[[nn.Module, tuple[Any, ...], tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def route(gate: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # noqa: ARG001
            return self._route(at, args[0], output)

        return route

    @torch.no_grad()
    def _route(self, at: int, hidden: Tensor, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the router of layer `at` returns instead of `output`: (logits, mixing weights, experts)."""
        if self._valid is None:
            raise RuntimeError("a router ran outside a forward pass of the steered model: call that model itself")
        router = self.routers[at]
        x = hidden.reshape(-1, hidden.shape[-1])
        logits = router.logits(x)
        if self._wants_pregate and self.feeds(at):
            self._pregates[at + 1] = self._grid(self.routers[at + 1].scores(x))
        experts = self._decide(at, self._grid(router.family.scores(router.gate, logits)))
        experts = torch.from_numpy(experts.reshape(len(x), -1).astype(np.int64)).to(x.device)[:, : router.top_k]
        kept = experts >= 0
        ids = torch.where(kept, experts, experts[:, :1])  # an elided expert is the best one again, with weight zero
        weights = router.family.weights(router.gate, logits, ids, kept)
        return (output[0], *_unless_own(output, weights, ids, kept))

    def _decide(self, at: int, scores: np.ndarray) -> np.ndarray:  # [B, S, k] int16
        assert self._valid is not None
        if np.isnan(scores[self._valid]).any():
            raise UserError(
                f"layer {self.routers[at].layer} has router scores that are not numbers: is the model damaged, or its "
                "precision too low?"
            )
        pregate = self._pregates.pop(at, None)
        prior = None
        if self._prior is not None:
            rows, which = self._prior
            prior = rows[which, at].reshape(scores.shape)
        decided = self._rows.decide(at, scores, pregate, prior, self._valid)
        self.totals += decided.counts.sum(axis=(0, 1), dtype=np.int64)
        if self._recorder is not None:
            self._recorder.layer(decided, scores, pregate)
        return decided.executed

    def _grid(self, values: Tensor) -> np.ndarray:  # [B, S, E] float32
        assert self._valid is not None
        found: np.ndarray = values.detach().cpu().numpy().reshape(*self._valid.shape, -1)
        return found


def _unless_own(output: tuple[Tensor, ...], weights: Tensor, experts: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and experts [N, k]; a row whose set is the router's own stays as the router wrote it, bit for bit.

    The model sums the experts of a token in the order that it is given. A router that did not compute in float32 may
    have chosen other experts, or weights that are not those of the float32 scores: its rows are replaced.
    """
    logits, own_weights, own = output
    if logits.dtype == torch.float32:
        same = (kept.all(-1) & (own.sort(-1)[0] == experts.sort(-1)[0]).all(-1)).unsqueeze(-1)
        weights, experts = torch.where(same, own_weights.float(), weights), torch.where(same, own, experts)
    return weights.to(own_weights.dtype), experts


def _no_beams(rows: Any) -> None:  # noqa: ARG001
    raise UserError("beam search exchanges rows, whose routing states cannot follow: generate with one beam")


def _valid(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """[B, S] bool: which positions of a forward pass are tokens, and not padding."""
    if mask is None:
        return np.ones(shape, np.bool_)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise UserError("the attention mask is not [rows, positions], so padding cannot be told: use a dynamic cache")
    found: np.ndarray = mask[:, -shape[1] :].detach().cpu().numpy() != 0
    return found
