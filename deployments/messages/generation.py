"""Messages of calls to generators.

    GenerationCall -> Started, Chunk, Chunk, ... (streamed) | Completion (unary)

A call has one prompt and one answer; a request for several answers makes several calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

from deployments.errors import ServeError
from deployments.messages.shared import CHARACTERS_PER_TOKEN, ModelRef, Truncation

# Variables of a chat template that the server sets.
TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class Chat(NamedTuple):
    """A conversation. The chat template of the model renders it as a prompt."""

    messages: tuple[dict[str, Any], ...]  # {"role", "content", ...} with string contents
    tools: tuple[dict[str, Any], ...] = ()  # function declarations in OpenAI's format
    variables: tuple[tuple[str, Any], ...] = ()  # further variables of the template, JSON values


# Text, token ids (no special tokens are added), or a conversation.
Prompt = str | tuple[int, ...] | Chat


def count_prompt(prompt: Prompt) -> int:
    """Count the characters or token ids of a prompt; estimate the characters of a rendered chat."""
    if not isinstance(prompt, Chat):
        return len(prompt)
    more = sum(len(str(each)) for each in (prompt.tools, prompt.variables) if each)
    return more + sum(
        len(message["content"])
        + len(message.get("reasoning_content", ""))
        + len(str(message.get("tool_calls", "")))
        for message in prompt.messages
    )


def estimate_prompt_tokens(prompt: Prompt) -> int:
    length = count_prompt(prompt)
    return length if isinstance(prompt, tuple) else length // CHARACTERS_PER_TOKEN


class SamplingParams(NamedTuple):
    """Parameters of token selection. The defaults sample from the unmodified distribution."""

    temperature: float = 1.0  # 0: greedy, always the most likely token
    top_k: int | None = None  # at least 1: keep the k most likely tokens
    top_p: float | None = None  # in (0, 1]: keep the smallest set with this probability
    min_p: float | None = None  # in [0, 1]: minimum probability relative to the maximum
    typical_p: float | None = None  # in (0, 1]: locally typical sampling, arXiv:2202.00666
    repetition_penalty: float = 1.0  # above 0; for tokens of prompt and answer, arXiv:1909.05858
    frequency_penalty: float = 0.0  # subtracted per occurrence in the answer, as OpenAI defines it
    presence_penalty: float = 0.0  # subtracted once if the answer has the token, as OpenAI does
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    seed: int | None = None  # None: a random seed, reported in `Started`


# Condition that ends beam search. True: as many answers are finished as there are beams. False: no
# running beam scores better now than the worst finished answer. "never": no running beam can score
# better later either.
EarlyStopping: TypeAlias = bool | Literal["never"]


class BeamSearchParams(NamedTuple):
    """Parameters of beam search, for answers that are searched instead of sampled."""

    num_beams: int  # at least 2
    length_penalty: float = 1.0  # above 0 favors longer answers, below 0 shorter ones
    early_stopping: EarlyStopping = False
    is_explicit: bool = True  # False: `num_beams` is the model's default; KV slots may reduce it


class Grammar(NamedTuple):
    """A grammar that constrains the generated text."""

    kind: Literal["json_object", "json_schema", "regex"]
    value: str = ""  # JSON schema as text, or regular expression


class Languages(NamedTuple):
    """Language tokens of a multilingual encoder-decoder model, as token ids."""

    source: int  # replaces the language token that the tokenizer adds to the prompt
    target: int  # first token of the output


class GenerationOptions(NamedTuple):
    """Options of a generation request, independent of the API."""

    sampling: SamplingParams = SamplingParams()
    beam_search: BeamSearchParams | None = None  # replaces sampling; cannot be streamed
    no_repeat_ngram_size: int = 0  # n-grams of this size do not repeat; 0: disabled
    max_new_tokens: int | None = None  # None: the remaining context
    min_new_tokens: int = 0  # end token and stop strings have no effect before this many tokens
    stop: tuple[str, ...] = ()  # the text ends at the first stop string
    include_stop_string: bool = False  # True as in TGI, False as in OpenAI
    grammar: Grammar | None = None
    logprobs: int | None = None  # top logprobs per token; None: no logprobs
    prompt_logprobs: bool = False  # include the prompt tokens with their logprobs
    # Number of prompt tokens to keep: the last ones. None: all tokens.
    truncate_prompt_tokens: int | None = None
    truncation: Truncation = Truncation.REFUSE  # for a prompt above the maximum length
    languages: Languages | None = None  # None: the defaults of the checkpoint
    prefix_cache_scope: str = ""  # prompts of one scope share cached prefixes


class GenerationCall(NamedTuple):
    """A request for one answer. `deadline_s`: time.monotonic, see deployments.deadlines."""

    model: ModelRef
    prompt: Prompt
    options: GenerationOptions
    deadline_s: float
    client: str = ""  # name of the client; queues serve clients in equal shares
    priority: int = 0  # index in PRIORITIES


class TopLogprob(NamedTuple):
    """One of the most likely tokens at a position.

    If the answer has this token at the position, text and bytes are those of its `Token`. Any other
    token is decoded in isolation, and U+FFFD replaces incomplete characters in its text.
    """

    id: int
    text: str
    logprob: float
    special: bool = False
    raw_bytes: bytes | None = None  # as in `Token`


# Marks around a call of a function in the text of an answer, as several model families write them.
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
# Marks of Mistral within a call, before its id and before its arguments.
CALL_ID, CALL_ARGUMENTS = "[CALL_ID]", "[ARGS]"
CALL_STRING = '<|"|>'  # before and after a string, in the calls of Gemma 4


class Token(NamedTuple):
    """One token of an answer or of a prompt.

    `text` is the text that the token completes. It is empty for a token that ends within a
    character. A special token has its name in a prompt and no text in an answer, whose text omits
    special tokens. Log-probabilities are the model's, before penalties and temperature; None if not
    requested, for the first token of a prompt, and in the reasoning.
    """

    id: int
    text: str
    logprob: float | None = None
    special: bool = False
    alternatives: tuple[TopLogprob, ...] = ()  # most likely first
    # Bytes that the token spells, if they are not `text` in UTF-8. Only with log-probabilities.
    raw_bytes: bytes | None = None
    # Whether the token belongs to the reasoning before an answer, not to its text.
    reasoning: bool = False


class FinishReason(StrEnum):
    # The answer has the maximum number of tokens, or the time limit of its request ended it.
    LENGTH = "length"
    END = "end"  # the model generated an end token, or the grammar is complete
    STOP = "stop"  # the text contains a stop string


class Started(NamedTuple):
    """First message of a stream, sent when the prompt is prefilled."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens from the prefix cache
    seed: int
    compute_type: str  # such as "cpu-int4"
    prompt: tuple[Token, ...] = ()  # empty unless `prompt_logprobs` is set
    ignores_tools: bool = False  # the request has tools, and the chat template does not use them


class GenerationTimings(NamedTuple):
    """Durations of the phases of an answer, in seconds."""

    queue_s: float = 0.0  # from submission until a KV slot was free
    prefill_s: float = 0.0  # from the assignment of the KV slot to the first token
    decode_s: float = 0.0  # from the first to the last token
    tokenize_s: float = 0.0  # before submission: chat template, and text to token ids


class Finished(NamedTuple):
    reason: FinishReason
    generated_tokens: int  # including the end token
    timings: GenerationTimings
    reasoning_tokens: int = 0  # tokens with `reasoning`
    stop: str = ""  # the stop string that ended the answer, if the reason is STOP


class Chunk(NamedTuple):
    """The next part of a stream: complete characters of text and the tokens since the last chunk.

    Text that may begin a stop string is held back, so the text of a token may arrive with a later
    chunk. Only tokens have the text of the reasoning. The last chunk has `finished`.
    """

    text: str
    tokens: tuple[Token, ...]
    finished: Finished | None = None


class Completion(NamedTuple):
    """A whole answer, merged from the events of its stream."""

    started: Started
    text: str
    tokens: tuple[Token, ...]
    finished: Finished


# A stream is one `Started`, then chunks until one has `finished`. A ServeError may end the stream
# at any point.
StreamEvent: TypeAlias = Started | Chunk | ServeError


def merge_timings(timings: Iterable[GenerationTimings]) -> GenerationTimings:
    """Return the longest time of each phase among several answers; zeros if there is none."""
    return GenerationTimings(*map(max, zip(*timings, strict=True)))


def merge_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """Merge consecutive chunks of one answer. `chunks` must not be empty."""
    if len(chunks) == 1:
        return chunks[0]
    text = "".join(chunk.text for chunk in chunks)
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    return Chunk(text, tokens, chunks[-1].finished)


def join_reasoning(part: Chunk | Completion) -> str:
    return "".join(token.text for token in part.tokens if token.reasoning)


def join_reasoning_and_text(part: Chunk | Completion) -> str:
    return join_reasoning(part) + part.text
