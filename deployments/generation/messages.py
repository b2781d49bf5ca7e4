"""What travels between the ingress and a generator: one frozen type per hop.

    GenerationCall -> Started, Chunk, Chunk, ... (streamed) | Completion (in one piece)

A call is one prompt and one answer to it; a request for several answers makes several calls. As in
`deployments.messages`, what crosses processes is a NamedTuple.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

from deployments.messages import ModelRef, Truncation


class Chat(NamedTuple):
    """A conversation, which the model's own chat template turns into a prompt."""

    messages: tuple[dict[str, Any], ...]  # {"role", "content", ...}; contents are strings
    tools: tuple[dict[str, Any], ...] = ()  # OpenAI's function declarations, for the template


# Text, tokens without any that the tokenizer would add, or a conversation.
Prompt = str | tuple[int, ...] | Chat


class Sampling(NamedTuple):
    """How the next token is chosen. The defaults leave the model's own distribution as it is."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int | None = None  # at least 1: only the k likeliest tokens
    top_p: float | None = None  # in (0, 1]: only the likeliest that together reach it
    min_p: float | None = None  # in [0, 1]: only those at least that share of the likeliest's
    typical_p: float | None = None  # in (0, 1]: locally typical sampling, arXiv:2202.00666
    repetition_penalty: float = 1.0  # above 0; of tokens in the prompt or the answer, CTRL's
    frequency_penalty: float = 0.0  # for each time a token stands in the answer, OpenAI's
    presence_penalty: float = 0.0  # once for every token that stands in the answer, OpenAI's
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit
    seed: int | None = None  # None: drawn anew, and told in `Started`


# True: as many finished answers as beams are enough. False: until none that runs looks better than
# the worst of them. "never": until none can become better.
EarlyStopping: TypeAlias = bool | Literal["never"]


class BeamSearchParams(NamedTuple):
    """Beam search, which gives the likeliest answer rather than a drawn one."""

    width: int  # beginnings kept side by side, at least 2
    length_penalty: float = 1.0  # above 0 longer answers win, below shorter ones
    early_stopping: EarlyStopping = False
    is_explicit: bool = True  # False: the model's own way, with fewer where there are fewer rows


class Grammar(NamedTuple):
    """What the text must follow."""

    kind: Literal["json_object", "json_schema", "regex"]
    value: str = ""  # the schema as JSON text, or the regular expression


class GenerationOptions(NamedTuple):
    """What a request says besides its prompt, whichever API it came through."""

    sampling: Sampling = Sampling()
    beams: BeamSearchParams | None = None  # in place of sampling; nothing of it can be streamed
    no_repeat_ngram_size: int = 0  # no run of so many tokens stands in the answer twice; 0: any may
    max_new_tokens: int | None = None  # None: what is left of the context
    min_new_tokens: int = 0  # before these the end token and the stop strings do not count
    stop: tuple[str, ...] = ()  # the text ends with the first of these
    include_stop_string: bool = (
        False  # the stop string is part of the text (TGI), or is not (OpenAI)
    )
    grammar: Grammar | None = None
    logprobs: int | None = None  # None: without; else alternatives told beside each token
    prompt_logprobs: bool = False  # also tell the prompt's tokens, with their logprobs
    truncate_prompt_tokens: int | None = None  # cut the prompt to its last tokens
    truncation: Truncation = Truncation.REFUSE  # of a prompt longer than the model reads


class GenerationCall(NamedTuple):
    """One answer asked of one model. `deadline_s` is wall-clock time: it crosses processes."""

    model: ModelRef
    prompt: Prompt
    options: GenerationOptions
    deadline_s: float


class TopLogprob(NamedTuple):
    """A token that might have come instead, with the text it has by itself."""

    id: int
    text: str
    logprob: float
    special: bool = False


class Token(NamedTuple):
    """One token of an answer, or of a prompt.

    `text` is what it adds to the text: nothing while a character is incomplete, and nothing for
    special tokens. Log-probabilities are those of the model, before penalties and temperature; None
    where none were asked for, and for the first token of a prompt.
    """

    id: int
    text: str
    logprob: float | None = None
    special: bool = False
    alternatives: tuple[TopLogprob, ...] = ()  # likeliest first


class FinishReason(StrEnum):
    """Why an answer ended."""

    LENGTH = "length"  # it has as many tokens as it may
    END = "end"  # the model said so, or the grammar allows nothing more
    STOP = "stop"  # a stop string came


class Started(NamedTuple):
    """The prompt was computed; the first of a stream."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, computed for an earlier request
    seed: int
    compute_type: str  # such as "cpu-int4"
    prompt: tuple[Token, ...] = ()  # where `prompt_logprobs` asks for them


class GenerationTimings(NamedTuple):
    """Where the time of an answer went, in seconds."""

    queue_s: float = 0.0  # until a slot was free
    prefill_s: float = 0.0  # from then until the first token
    decode_s: float = 0.0  # from then until the last one


class Finished(NamedTuple):
    """How an answer ended."""

    reason: FinishReason
    generated_tokens: int  # the end token included
    timings: GenerationTimings


class Chunk(NamedTuple):
    """The next part of a stream: whole characters of text, and the tokens that came meanwhile.

    Text that may be the start of a stop string is held back, so a token's text may come with a
    later chunk. The last chunk is the one that is `finished`.
    """

    text: str
    tokens: tuple[Token, ...]
    finished: Finished | None = None


class Completion(NamedTuple):
    """A whole answer."""

    started: Started
    text: str
    tokens: tuple[Token, ...]
    finished: Finished
