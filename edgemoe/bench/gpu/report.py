"""A report as one JSON object, and the bars that the GPU tier is held to."""

from dataclasses import asdict
from typing import Any

from edgemoe.bench.bars import Bar
from edgemoe.bench.gpu.against import Split
from edgemoe.bench.gpu.determinism import verdict
from edgemoe.bench.gpu.rows import Row, is_preset
from edgemoe.bench.gpu.run import Report

FAR_MS, FAR_SHARE, TIMELINE, PROMPT = 0.9, 0.60, 1.20, 1.25
AGAINST = {"50%": 4.0, "25%": 2.5}  # times llama.cpp, of psr-gated at λ = 0.2


def bars(report: Report) -> list[Bar]:
    """What is promised of the tier, and whether this run keeps it. Times are a GPU's: on the CPU none applies."""
    found = []
    if report.device == "cuda":
        found += _far(report)
        for row in report.rows:
            if row.executor == "device" and _is_bar(row) and row.over_timeline is not None:
                what = f"{row.name} at {row.share}: ms / dependency timeline"
                holds = row.over_timeline <= TIMELINE
                found.append(Bar(what, row.over_timeline, f"≤ {TIMELINE:.2f}", holds))
        found += _prompts(report) + _against(report)
    said = verdict(report.determinism)
    if said["logical"] is not None:
        found.append(
            Bar("text on the logical cache, however bytes are moved", None, "one and the same", said["logical"])
        )
    if said["physical"] is not None:
        what = "text or residents, routed on the physical cache"
        found.append(Bar(what, None, "differ", not said["physical"]))
    decided = [row.agrees for row in report.rows if row.agrees is not None]
    if decided:
        found.append(Bar("residents of every row as the host's Algorithm 1 has them", None, "equal", all(decided)))
    return found


def _is_bar(row: Row) -> bool:
    return (is_preset(row, "psr-gated") or is_preset(row, "exact-lru")) and row.share in AGAINST


def _prompts(report: Report) -> list[Bar]:
    found = []
    for one in report.prompts:
        if one.executor == "device" and one.slots < report.n_experts and one.over_limit is not None:
            what = f"prompt of {one.tokens}, {one.name} at {one.share}: time / the longer of link and computing"
            found.append(Bar(what, one.over_limit, f"≤ {PROMPT:.2f}", one.over_limit <= PROMPT))
    return found


def _against(report: Report) -> list[Bar]:
    found = []
    for split, row in against_best(report):
        if row.mean is None or row.executor != "device":
            continue
        bar: float | None
        if row.slots == report.n_experts:
            bar, what = 1.0, "everything resident: times llama.cpp"
        elif _is_bar(row):
            bar = AGAINST[row.share] if is_preset(row, "psr-gated") else None
            what = f"{row.name} at {row.share}: times llama.cpp at equal expert memory"
        else:
            continue
        times = split.token_s / row.mean
        found.append(Bar(what, times, f"≥ {bar:g}" if bar else "shown", times >= bar if bar else None))
    return found


def against_best(report: Report) -> list[tuple[Split, Row]]:
    """llama.cpp's best split at each residency, with each row of that residency."""
    best = {split.share: split for split in report.against if split.best}
    return [(best[row.share], row) for row in report.rows if row.share in best]


def _far(report: Report) -> list[Bar]:
    far = report.far
    if far is None:
        return []
    what = f"everything resident, context of {far.position:,}"
    fast = "H200" in report.card or "H100" in report.card or "B200" in report.card
    why = "" if fast else "the bar is an H200's"
    ms = 1e3 * far.token_s
    return [
        Bar(f"{what}: ms per token", ms, f"≤ {FAR_MS:g}", ms <= FAR_MS if fast else None, why),
        Bar(f"{what}: share of the memory's limit", far.share, f"≥ {FAR_SHARE:.0%}", far.share >= FAR_SHARE),
    ]


def as_json(report: Report) -> dict[str, Any]:
    """Everything that was measured. Seconds, bytes, bytes per second, shares."""
    return {
        "subject": report.subject,
        "fingerprint": report.fingerprint,
        "notes": list(report.notes),
        "device": report.device,
        "card": report.card,
        "versions": report.versions,
        "windows": list(report.domains),
        "window_tokens": report.window_tokens,
        "expert_bytes": report.expert_bytes,
        "rates": asdict(report.rates) if report.rates else None,
        "rounds": report.ended.rounds,
        "ended": report.ended.why or None,
        "interrupted": report.interrupted,
        "rows": [row.as_json() for row in report.rows],
        "beside": [one.as_json() for one in report.beside],
        "equal_kl": [one.as_json() for one in report.equal_kl],
        "quality_models": list(report.quality_models),
        "resident_at_1024": {**asdict(report.far), "share": report.far.share} if report.far else None,
        "load_s": report.load_s,
        "prompts": [one.as_json() for one in report.prompts],
        "generated": [one.as_json() for one in report.generated],
        "determinism": [run.as_json() for run in report.determinism],
        "llama.cpp": [split.as_json() for split in report.against],
        "bars": [asdict(bar) for bar in bars(report)],
    }
