"""`edgemoe eval`: what a routing policy costs in quality. A verb has a module of its own and joins here."""

from edgemoe.cli.eval_compare import compare
from edgemoe.cli.eval_divergence import divergence
from edgemoe.cli.eval_tasks import tasks
from edgemoe.cli.groups import group

app = group("eval", "Measure what a routing policy changes in a model's output, and whether it is more than chance.")

for verb in (divergence, tasks, compare):
    app.command()(verb)
