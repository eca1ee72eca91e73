"""Text out of an engine: prompts, chat templates, sampling, stop strings, and the loop that streams it all.

    from edgemoe.generation import load
    with load("model.gguf") as writer:
        print(writer.write("Once upon a time", n=50))

Read `generate` first, then `engine` (what it asks of an engine) and `sampling`.
"""

from edgemoe.generation.engine import Engine, EngineStats, Observer
from edgemoe.generation.generate import Context, Step, generate
from edgemoe.generation.loading import load
from edgemoe.generation.options import Options
from edgemoe.generation.writer import Writer

__all__ = ["Context", "Engine", "EngineStats", "Observer", "Options", "Step", "Writer", "generate", "load"]
