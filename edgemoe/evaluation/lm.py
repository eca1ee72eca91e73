"""An lm-evaluation-harness model: any of its tasks, answered by any engine under any policy.

from edgemoe.evaluation.lm import PolicyLM
lm = PolicyLM(EngineAnswers(engine))
results = lm_eval.simple_evaluate(lm, tasks=["arc_easy"])

Importing this module imports lm_eval, which is slow.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from edgemoe.errors import UserError
from edgemoe.evaluation.answers import Answers
from edgemoe.generation.chat import ChatTemplate, Message
from edgemoe.generation.options import Options

DEFAULT_GEN_TOKENS = 256  # lm-eval's own, where a task does not say
_READ = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p"}
# Settings of other engines that tasks name, with the values that change nothing here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "skip_special_tokens": (None, True),
}


class PolicyLM(TemplateLM):
    """`Answers` as an `lm_eval.api.model.LM`.

    A text starts with BOS where the model wants one. A request longer than the context loses its beginning, as in
    lm-eval's own models; `truncated` counts them. chat: prompts come from `apply_chat_template`, so what names a
    special token in them is that token. Sampled texts depend on `seed` and on which question they answer, not on when.

    Raises `UserError` for a continuation longer than the context, a task that leaves its prompt no room, and generation
    settings that no engine here has.
    """

    def __init__(self, answers: Answers, seed: int = 0, chat: bool = False) -> None:
        super().__init__()
        self._answers, self._seed, self._chat = answers, seed, chat
        self.truncated = 0

    @property
    def max_length(self) -> int:
        return self._answers.n_ctx

    @property
    def max_gen_toks(self) -> int:
        return DEFAULT_GEN_TOKENS

    @property
    def batch_size(self) -> int:
        return self._answers.batch

    @property
    def eot_token_id(self) -> int | None:
        return min(self._answers.language.eos_tokens, default=None)

    @cached_property
    def prefix_token_id(self) -> int:
        """What a text without context follows: BOS, or else the end of another text."""
        bos = self._answers.language.bos
        found = self.eot_token_id if bos is None else bos
        if found is None:
            raise UserError("without BOS or end-of-text token this model cannot score a text that follows nothing")
        return found

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_more: Any) -> list[int]:
        """Token ids; with BOS, once, unless `add_special_tokens` is False."""
        language = self._answers.language
        ids = language.tokenize(string.encode(errors="replace"), special=self._chat).tolist()
        if add_special_tokens is not False and language.bos is not None and ids[:1] != [language.bos]:
            ids.insert(0, language.bos)
        return ids

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        **_more: Any,
    ) -> list[tuple[float, bool]]:
        found = [(0.0, True)] * len(requests)  # what nothing has: a continuation that became no token
        at = [which for which, (_, _, continuation) in enumerate(requests) if continuation]
        pairs = [self._fitted(*requests[which][1:]) for which in at]
        for which, answer in zip(at, self._answers.loglikelihoods(pairs), strict=True):
            found[which] = answer
        return found

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise UserError(
                f"a continuation of {len(continuation):,} tokens does not fit into a context of {self.max_length:,}: "
                "give a larger --ctx"
            )
        return self._cut(context or [self.prefix_token_id], room), continuation

    def _cut(self, context: list[int], room: int) -> list[int]:
        self.truncated += len(context) > room
        return context[-room:]

    def loglikelihood_rolling(self, requests: Sequence[Instance], **_more: Any) -> list[float]:
        """Of each text, nats of its log-likelihood; one longer than the context in windows, which start afresh."""
        pairs, owner = [], []
        for at, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                pairs.append(make_disjoint_window(window))
                owner.append(at)
        found = [0.0] * len(requests)
        for at, (nats, _) in zip(owner, self._answers.loglikelihoods(pairs), strict=True):
            found[at] += nats
        return found

    def generate_until(self, requests: Sequence[Instance], **_more: Any) -> list[str]:
        prompts = []
        repeats: Counter[tuple[Any, ...]] = Counter()
        for request in requests:
            key = (request.task_name, request.doc_id, request.idx)
            context, settings = request.args
            options = self._options(settings, (*key, repeats[key]))
            repeats[key] += 1
            room = self.max_length - (options.n or 0)
            if room < 1:
                raise UserError(
                    f"{request.task_name}: {options.n:,} tokens to generate leave a prompt no room in a context of "
                    f"{self.max_length:,}: give a larger --ctx"
                )
            prompts.append((self._cut(self.tok_encode(context) or [self.prefix_token_id], room), options))
        return self._answers.texts(prompts)

    def _options(self, settings: Mapping[str, Any], which: tuple[Any, ...]) -> Options:
        given: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), DEFAULT_GEN_TOKENS))
        for name in sorted(given.keys() - _READ):
            if given[name] not in _NEUTRAL.get(name, (None,)):
                raise UserError(
                    f"{which[0]}: generation_kwargs {name}: {given[name]}: no engine here has that: leave the task out"
                )
        drawn = bool(given["do_sample"])
        return Options(
            n=given["max_gen_toks"],
            temperature=float(given.get("temperature", 1.0)) if drawn else 0.0,
            top_k=int(given.get("top_k") or 0),
            top_p=float(given.get("top_p") or 1.0),
            min_p=float(given.get("min_p") or 0.0),
            seed=_seed(self._seed, *which),
            stop=tuple(text for text in given["until"] if text),
        )

    def work(self, request: Instance) -> int:
        """Tokens that answering will take at most, for progress."""
        if request.request_type == "generate_until":
            options = self._options(request.args[1], (request.task_name,))
            return len(self.tok_encode(request.args[0])) + (options.n or 0)
        return len(self.tok_encode("".join(request.args)))

    def apply_chat_template(self, chat_history: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template writes it. A last turn of the assistant's, where no new one is asked
        for, is left open: the model goes on with it."""
        last = chat_history[-1]
        if not add_generation_prompt and last["role"] == "assistant":
            return self._template.render(list(chat_history[:-1])) + last["content"]
        return self._template.render(list(chat_history))

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self._answers.language)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return (self._answers.language.chat_template or "") if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """Names the template, for lm-eval's cache of requests."""
        source = self._answers.language.chat_template or ""
        return f"edgemoe-{hashlib.sha256(source.encode()).hexdigest()[:12]}"


def _seed(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")
