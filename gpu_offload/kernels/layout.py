"""Where a layer's state lies on the device: four tensors, whose rows are named here for kernels and host alike."""

INTS = ("slot_of", "warm_slot", "warm_rank", "recency", "uses", "protected", "priority", "predicted")
"""[L, 8, EP] int32, as in `edgemoe.policy.state.Cache`, except: `priority` is an integer or, with score eviction, the
bits of a float32; `predicted` is each expert's place from 1 among those that part 1 predicted, 0 for the others."""
REALS = ("fast", "slow", "prior")
"""[L, 3, EP] float32."""
WORDS = ("clock", "frozen", "n_predicted", "_")
"""[L, 4] int32."""
SCALES = ("scale", "range_sum")
"""[L, 2] float32."""
COUNTS = ("executed", "demand", "prefetch")
"""[L, 3] int32: how many entries of a layer's lists are valid. A list of copies holds max k demand copies at the front,
and n prefetch copies behind them."""

MOST_EXPERTS, MOST_EXECUTED = 512, 256
"""Of a layer: kernels pack an expert into 9 bits, and an executed one's place into 8."""
MOST_ENTRIES = 2**31 - 1
"""Of a token prior, whose entries and rows an int32 counts."""


def padded(n_experts: int) -> int:
    """EP: E up to a power of two, and to a whole warp."""
    return max(32, 1 << (int(n_experts) - 1).bit_length())
