"""The Python interface: load a model, generate.

from edgemoe.generation import load
with load("model.gguf") as writer:
    print(writer.write("Once upon a time", n=50))
"""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgemoe.generation.chat import ChatTemplate, Message
from edgemoe.generation.engine import Engine
from edgemoe.generation.generate import Context, Step, generate
from edgemoe.generation.options import Options
from edgemoe.generation.prompt import Said, chat_prompt, plain_prompt
from edgemoe.generation.sampling import Sampler

if TYPE_CHECKING:
    from edgemoe.calibration import Calibration


class Writer:
    """An engine with its memory: a prompt that begins like the last one computes only what is new.

    A prompt is a text to continue, or messages (`[{"role": "user", "content": "…"}]`), to which the model's chat
    template is applied. Keyword arguments are fields of `Options`. A context manager that closes the engine.

    Of experts on disk, what the caches hold is kept, too: under a steered policy, which favours what is resident, a
    prompt can go on differently the second time. Of experts in RAM with slots on a device, the policy goes back with
    the context, and the text is the same. `reset` makes the next prompt the first.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.context = Context(engine)
        self.template: ChatTemplate | None = None
        """What messages are written with; by default the model's own, from the first time that it is needed."""
        self.prompt: list[int] = []
        """The last prompt's tokens."""
        self.seed = 0
        """The seed of the last generation: drawn, where the options left it open."""
        self.calibration: Calibration | None = None
        """What its policy knows from held-out text, if anything."""
        self._said: Said | None = None  # the last conversation

    def stream(self, prompt: str | Sequence[Message], **options: Any) -> Iterator[Step]:
        """Yield a `Step` per token as it comes; `step.text` is what may be printed. Raises `UserError` at once for a
        bad option or prompt."""
        return self.run(prompt, Options(**options))

    def write(self, prompt: str | Sequence[Message], **options: Any) -> str:
        """The whole text that follows the prompt."""
        return "".join(step.text for step in self.stream(prompt, **options))

    def run(self, prompt: str | Sequence[Message], options: Options) -> Iterator[Step]:
        """`stream` with the options as one value."""
        sampler = Sampler(options, self.engine)
        self.prompt, self.seed = self.tokens(prompt), sampler.seed
        steps = generate(self.context, self.prompt, sampler.options, sampler)
        return steps if isinstance(prompt, str) else self._noted(steps)

    def tokens(self, prompt: str | Sequence[Message]) -> list[int]:
        """The prompt as the model gets it."""
        if isinstance(prompt, str):
            return plain_prompt(self.engine, prompt)
        self.template = self.template or ChatTemplate.of(self.engine)
        rendered = self.template.render(prompt)
        tokens = chat_prompt(self.engine, rendered, self._said)
        self._said = Said(rendered.encode(), list(tokens))
        return tokens

    def _noted(self, steps: Iterator[Step]) -> Iterator[Step]:
        said = self._said
        assert said is not None
        for step in steps:
            if step.finish != "end":
                said.add(self.engine.piece(step.token), step.token)
            yield step

    def reset(self) -> None:
        """Forget every prompt: the memory is emptied, the policy is as at the start."""
        self.engine.reset()
        self.context.tokens.clear()
        self._said = None

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
