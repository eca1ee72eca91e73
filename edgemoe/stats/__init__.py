"""Paired comparisons and what they can and cannot tell: differences, intervals, tests, corrections.

The protocol is that of the PSR paper (§5, §6.1, §6.4, Appendix A). Every function is pure, takes plain sequences of
numbers and returns a frozen dataclass; a seed decides whatever is drawn. Arguments that make no sense (other lengths,
no numbers, too few) are a ValueError: commands refuse a person's mistakes before they come here.
"""

from edgemoe.stats.difference import Difference, clustered_difference, paired_difference
from edgemoe.stats.mcnemar import McNemar, mcnemar
from edgemoe.stats.multiplicity import Holm, holm
from edgemoe.stats.permutation import SignFlip, sign_flip
from edgemoe.stats.power import smallest_difference, smallest_discordance
from edgemoe.stats.ratio import Ratio, log_ratio
from edgemoe.stats.summary import Interaction, MeanOverTasks, difference_of_differences, mean_over_tasks

__all__ = [
    "Difference",
    "Holm",
    "Interaction",
    "McNemar",
    "MeanOverTasks",
    "Ratio",
    "SignFlip",
    "clustered_difference",
    "difference_of_differences",
    "holm",
    "log_ratio",
    "mcnemar",
    "mean_over_tasks",
    "paired_difference",
    "sign_flip",
    "smallest_difference",
    "smallest_discordance",
]
