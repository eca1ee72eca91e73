"""The training loop: AdamW in bf16, warm-up and linear decay, checkpoints that a later run resumes from.

Non-goals: several GPUs, gradient accumulation. A model of this size fits many times over.
"""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
from torch import Tensor

from edgemoe.data import DOMAINS
from edgemoe.errors import UserError
from edgemoe.progress import progress
from edgemoe.training.data import Corpus, training_batch, validation_batches
from edgemoe.training.losses import cross_entropy, loads, objective
from edgemoe.training.model import ModelConfig, MoEModel


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the result, besides the corpus."""

    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 9000
    batch: int = 128  # windows of `model.context` tokens
    peak_lr: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    balance: float = 0.01  # α of the Switch loss
    seed: int = 1
    validate_every: int = 1000  # steps
    valid_tokens: int = 500_000  # of each domain

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.model.context

    def lr(self, step: int) -> float:
        """Linear warm-up to the peak, then linear decay to a hundredth of it."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        left = (self.steps - step) / max(self.steps - self.warmup, 1)
        return self.peak_lr * (0.01 + 0.99 * left)


@dataclass
class _State:
    model: MoEModel
    optimizer: torch.optim.Optimizer
    step: int = 0


def train(config: TrainConfig, corpus: Corpus, directory: Path, device: str, checkpoint_s: float = 120.0) -> MoEModel:
    """Train to `config.steps`, resuming from `directory/checkpoint.pt` if there is one.

    Writes `log.jsonl` as it goes, a checkpoint every `checkpoint_s` seconds and when interrupted (Ctrl-C, SIGTERM),
    and `result.json` with the held-out figures at the end.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state = _start(config, directory, device)
    run = torch.compile(objective) if device == "cuda" else objective
    last_saved = time.monotonic()
    total, done = config.tokens, state.step * config.batch * config.model.context
    with _stop_signal() as stopped, (directory / "log.jsonl").open("a") as log, progress("training", total) as advance:
        advance(done)
        while state.step < config.steps and not stopped:
            record = _step(config, corpus, state, run, device)
            advance(config.batch * config.model.context)
            if state.step % 50 == 0:
                _write(log, {name: float(value) for name, value in record.items()})
            if state.step % config.validate_every == 0:
                _write(log, {"step": state.step, "valid": evaluate(state.model, corpus, config, device)["domains"]})
            if time.monotonic() - last_saved > checkpoint_s:
                _save(config, state, directory)
                last_saved = time.monotonic()
    _save(config, state, directory)
    if stopped:
        raise KeyboardInterrupt
    (directory / "result.json").write_text(json.dumps(evaluate(state.model, corpus, config, device), indent=1))
    return state.model


def _step(config: TrainConfig, corpus: Corpus, state: _State, run: Any, device: str) -> dict[str, Any]:
    lr = config.lr(state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    inputs, targets = training_batch(corpus, state.step, config.batch, config.model.context, config.seed)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        loss, ce, balance = run(state.model, inputs, targets, config.balance)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.clip)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    return {"step": state.step, "lr": lr, "ce": ce, "balance": balance, "grad_norm": norm}


def _write(log: TextIO, record: dict[str, Any]) -> None:
    log.write(json.dumps(record) + "\n")
    log.flush()


def _start(config: TrainConfig, directory: Path, device: str) -> _State:
    model = MoEModel(config.model, seed=config.seed).to(device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.peak_lr,
        betas=(config.beta1, config.beta2),
        fused=device == "cuda",
    )
    state = _State(model, optimizer)
    path = directory / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        if saved["config"] != asdict(config):
            raise UserError(f"{path}: made with other settings; choose another directory or remove it")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.step = saved["step"]
    return state


def _save(config: TrainConfig, state: _State, directory: Path) -> None:
    """A checkpoint appears whole or not at all."""
    partial = directory / "checkpoint.pt.tmp"
    torch.save(
        {
            "config": asdict(config),
            "model": state.model.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "step": state.step,
        },
        partial,
    )
    partial.replace(directory / "checkpoint.pt")


@contextmanager
def _stop_signal() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end the step in hand; the list they fill is empty until then."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@torch.no_grad()
def evaluate(model: MoEModel, corpus: Corpus, config: TrainConfig, device: str) -> dict[str, Any]:
    """Held-out cross-entropy per domain beside the domain's unigram entropy, and each layer's least-used expert."""
    domains: dict[str, Any] = {}
    shares = torch.zeros(config.model.n_layers, config.model.n_experts, device=device)
    for domain in DOMAINS:
        batches = validation_batches(corpus, domain, 32, config.model.context, config.valid_tokens)
        total = torch.zeros((), device=device)
        count = 0
        for inputs, targets in batches:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                hidden, routings = model(inputs)
                total += cross_entropy(model, hidden, targets) * targets.numel()
            count += targets.numel()
            shares += _layer_loads(routings) * targets.numel()
        ce = float(total) / count
        entropy = corpus.unigram_entropy[domain]
        domains[domain] = {"cross_entropy": ce, "unigram_entropy": entropy, "ratio": ce / entropy, "tokens": count}
    shares /= shares.sum(-1, keepdim=True)
    return {
        "domains": domains,
        "least_load": shares.min(-1).values.tolist(),
        "most_load": shares.max(-1).values.tolist(),
    }


def _layer_loads(routings: list[Any]) -> Tensor:  # [L, E]
    return torch.stack([loads(routing) for routing in routings])
