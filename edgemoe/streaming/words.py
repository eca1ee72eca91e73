"""The words of the callback's control block, which `decider.Decider` fills and `step` works on (int64 each)."""

# what does not change, and addresses
(STORE, BLOCKS, LAYERS, EXPERTS, MODE, PRIOR) = range(6)
(ROWS, ROUTING_OUT, PREGATE_OUT, COUNTS_OUT, COPIES_OUT, CAPACITY) = range(6, 12)
(WANTED, NEEDED, ASKED, PREPARED) = range(12, 16)
# what changes
(TOKENS, COMPLAINT) = range(16, 18)
(LOADS, MISSES, DEMAND_READS, DEMAND_BYTES, PREFETCH_READS, PREFETCH_BYTES) = range(18, 24)
(IN_TIME, LATE, UNUSED, WAIT_NS, POLICY_NS) = range(24, 29)
# which layer still waits for the slices of its last product (−1: none), and room for a list of experts, int64 [E]
(COMPLAINT_LAYER, OPEN, CHOSEN) = range(29, 32)
# streams: how many, of which each row of a decode is, which live; what the store keeps per layer, and may at most while
# a layer runs; when each expert last ran, int64 [L, E]; how many streams hold each of a layer's, int64 [E]
(STREAMS, ROW_STREAM, LIVE, KEEP, LIMIT, USED, HELD) = range(32, 39)
# whether each stream has one row in this decode, which decode it is, and totals of such: distinct experts, layers
(SINGLE, CLOCK, DISTINCT, TURNS) = range(39, 43)
COUNTERS = [*range(LOADS, POLICY_NS + 1), DISTINCT, TURNS]
MOST = 43  # experts that a token executes in a layer, at most: the width of ROUTING_OUT
CTL_WORDS = 48

# MODE: does the policy choose by scores, and are its choices written?
OBSERVE, SELECT = 0, 1

# COMPLAINT
READS_FAILED, WRONG_IDS, WRONG_ROWS, NO_STOP = 1, 2, 3, 4

# one layer, [L, ROW_WORDS]: the taps of its choice, scores, group mask and router input (−1: none), the bytes of an
# expert, the pre-gate (float32 [E, d], 0: none), its width, its steps and their operands, its groups; whether a node of
# the graph stops before the last product
(TOPK_TAP, SCORES_TAP, MASK_TAP, INPUT_TAP, EXPERT_BYTES, WEIGHT, WIDTH) = range(7)
(STEPS, FIRST_STEP) = 7, 8  # (operation, operand's address) pairs follow
MAX_STEPS = 4
(GROUPS, GROUPS_USED, OF_SOFTMAX) = range(FIRST_STEP + 2 * MAX_STEPS, FIRST_STEP + 2 * MAX_STEPS + 3)
TOP_K = OF_SOFTMAX + 1
STOPS = TOP_K + 1
ROW_WORDS = 24
STEP_CODES = {"ADD": 0, "SIGMOID": 1, "SOFT_MAX": 2, "SOFTPLUS": 3, "SQRT": 4}
