"""The memory that the tier needs for each case, known from the shape of the model before a byte of it is written."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgemoe.bench.case import TOLD, Case
from edgemoe.bench.loads import Shape
from edgemoe.errors import UserError
from edgemoe.model import Model, read_model
from edgemoe.model.synthetic import write_synthetic
from edgemoe.streaming.budget import budget_of_streams, expert_pages
from edgemoe.units import format_bytes

_MB = 1_000_000


def check_memory(shape: Shape, cases: Sequence[Case], limit: int) -> None:
    """Raise `UserError`, with the least that all cases need, where a group of `limit` bytes is too small for one."""
    with tempfile.TemporaryDirectory(prefix="edgemoe-bench-") as folder:
        [path] = write_synthetic(Path(folder) / shape.name, hole=True, **shape.fields)
        model = read_model(path)
        needs = {case.name: least_group(model, case) for case in cases}
    most = max(needs, key=lambda name: needs[name])
    if needs[most] <= limit:
        return
    fewer = ", or fewer --streams" if any(case.streams > 1 and needs[case.name] > limit for case in cases) else ""
    raise UserError(
        f"{format_bytes(limit)} of memory are too little for {most}, which needs {format_bytes(needs[most])}: "
        f"give --ram {math.ceil(needs[most] / _MB)}MB{fewer}"
    )


def least_group(model: Model, case: Case) -> int:
    """Bytes of the smallest group in which the tier can run a case."""
    slots = max(model.geometry.top_k, case.policy.window)
    need = budget_of_streams(
        model,
        case.policy,
        case.streams,
        n_ctx=case.n_ctx,
        kv_type="f16",
        expert_bytes=expert_pages(model),
        chunk=1,
        slots=slots,
    )
    return math.ceil(need.total / TOLD) + 1
