"""How a kernel follows the one before it: on a GPU that can, its blocks start while the other's still run.

With EARLY (programmatic dependent launch, compute capability 9.0 and later) a block reads what it may read already,
such as its rows of a matrix, then waits for the kernel before, and only then lets the kernel behind it start. So at
any time at most two kernels of a token are under way, and before its wait a kernel may read what any kernel but the
one before it has written. Such reads bypass the L1 cache (`.cg`), which another SM's stores do not reach. Every block
waits, also where it then has nothing to do: the order rests on it. Without EARLY, kernels follow each other whole.

A token's first kernels follow the token before whole in either case (`program.TokenProgram.launch`). So what changes
between tokens only, its position and whether the text has ended, is read before the wait like any constant.

One kernel does not wait for the one before: experts begin with the decision, and each of their blocks waits for the
word that says what it executes (`copying.take_turn`), while the decision goes on to write down what follows for later
layers. Until then they may read what the router's product and earlier kernels wrote, which the decision has waited for.
They wait for its end at their own. The kernel behind them may begin while both run, and reads nothing of either before
its wait.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_previous(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """From here on, all that earlier kernels wrote may be read, and anything may be written."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Once every block has come here, the next kernel's may start."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def await_end_of_previous(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `await_previous`; when the next kernel may start is said elsewhere."""
    if EARLY:
        gdc_wait()
