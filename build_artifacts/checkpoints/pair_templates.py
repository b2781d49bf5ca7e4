"""The text in which a decoder reads a query and a document, found by rendering its chat template.

As in sentence-transformers, the messages have the roles `query` and `document`, and the prompt of
the model, its instruction, is a system message before them. The server renders no chat templates
for pairs: the fixed parts around the contents suffice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from tokenizers import Tokenizer

from build_artifacts.checkpoints.architectures import TransformersConfig
from build_artifacts.checkpoints.checkpoint import Checkpoint, Json, read_modules
from build_artifacts.checkpoints.decoders import read_chat_templates, special_tokens
from build_artifacts.checkpoints.qwen3_reranker import QWEN3_RERANKER
from build_artifacts.checkpoints.sentences import read_path, read_prompts, read_transformer_config
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.manifest import CHAT_TEMPLATE_NAME
from deployments.artifacts.pair_template import PairTemplate
from deployments.errors import ServeError
from deployments.generation.chat_template import ChatTemplate
from deployments.messages import Chat
from deployments.tokenization.encodings import open_tokenizer

# Stand-ins for the parts of a pair, which no template contains: they mark where the parts go.
_INSTRUCTION, _QUERY, _DOCUMENT = "Instruction7f3a", "Query7f3a", "Document7f3a"
# Other parts, to check what the first ones gave: other lengths, several lines, white space around
# them, and marks that some templates remove.
_OTHER = (
    " Rate:\nis it {{ useful }}?",
    "\n two  words?\n",
    " A line.\n\n<b>Another</b> one <|im_end|> <think>\nno</think>" + 2_000 * "\nlong " + "\t",
)
# Two contents whose last tokens differ, to count the fixed tokens after them. sentence-transformers
# takes the same.
_FILLERS = ("0", "1 2 3 4")
# Settings of sentence-transformers beside the variables of the template, with the values that have
# no effect here; None: any value.
_SETTINGS: Mapping[str, Sequence[Json] | None] = {
    "padding": None,
    "return_tensors": None,
    "restore_suffix": (True,),
    "truncation": (True, "longest_first", None),
    # These select another template, more inputs or another limit.
    "chat_template": (None,),
    "continue_final_message": (False, None),
    "documents": (None,),
    "max_length": (None,),
    "tools": (None,),
}
# Stand-in for the date, to find templates that write it: their texts would keep the build's date.
_DATE = "Date7f3a"


def read_pair_template(
    checkpoint: Checkpoint, config: TransformersConfig, *, required: bool
) -> PairTemplate | None:
    """Return the text of a pair; None if the tokenizer joins the segments.

    The chat template renders it if the config of the module Transformer states messages. Without
    modules, it does if it renders both roles. If `required`, such a checkpoint must have a text,
    and Qwen3 always has one. Raises UnsupportedModel without such a text, for a template that
    changes the contents, or whose text does not begin with the special tokens that the tokenizer
    would add.
    """
    modalities = read_path(read_transformer_config(checkpoint.weights), "modality_config")
    # Modules without modalities are from older versions of sentence-transformers, and read texts.
    has_messages = "message" in modalities if modalities else not read_modules(checkpoint.directory)
    if not has_messages:
        return None
    source = read_chat_templates(checkpoint.weights).get(CHAT_TEMPLATE_NAME)
    renderers = _open_renderers(checkpoint, source)
    template = next(filter(None, (each.find_template() for each in renderers)), None)
    if template is None and config.model_type == "qwen3" and required and not modalities:
        template = QWEN3_RERANKER
    if template is None and (modalities or required):
        raise UnsupportedModel(
            "the chat template does not render the roles `query` and `document`, so the text in "
            "which the model reads them is unknown",
            hint=f"add a {CHAT_TEMPLATE_NAME} that renders both",
        )
    if template is None:
        return None
    tokenizer = open_tokenizer(checkpoint.weights)
    template = _omit_added_tokens(template, tokenizer)
    return template.model_copy(update={"end_tokens": _count_end_tokens(template, tokenizer)})


class _Renderer(NamedTuple):
    """The chat template of a checkpoint as sentence-transformers calls it."""

    template: ChatTemplate
    variables: tuple[tuple[str, Json], ...]
    has_generation_prompt: bool
    is_structured: bool  # contents are lists of objects with a type, not strings
    default_prompt: str | None

    def render(self, instruction: str | None, query: str, document: str) -> str:
        """Render a pair. Raises ServeError with the error of the template."""
        roles = {"system": instruction, "query": query, "document": document}
        messages = tuple(
            {"role": role, "content": self._wrap(text)}
            for role, text in roles.items()
            if text is not None
        )
        clock = ("strftime_now", lambda _format: _DATE)
        chat = Chat(messages, variables=(*self.variables, clock))
        return self.template.render(chat, add_generation_prompt=self.has_generation_prompt)

    def _wrap(self, text: str) -> Json:
        return [{"type": "text", "text": text}] if self.is_structured else text

    def find_template(self) -> PairTemplate | None:
        """Return the fixed parts of the text, without `end_tokens`; None if a role is missing.

        Raises UnsupportedModel if the text is not made of fixed parts and the contents, or has the
        date.
        """
        try:
            text = self.render(self.default_prompt, _QUERY, _DOCUMENT)
        except ServeError:
            return None
        if _QUERY not in text or _DOCUMENT not in text:
            return None
        if _DATE in text:
            raise UnsupportedModel(
                "the chat template writes the date into the text of a pair",
                hint=f"use a {CHAT_TEMPLATE_NAME} with a fixed text",
            )
        try:
            instructed = self.render(_INSTRUCTION, _QUERY, _DOCUMENT)
        except ServeError:  # the template takes no system message
            instructed = text
        try:
            for template in _split(text, instructed):
                if self._is_right(template):
                    return template
        except ServeError:
            pass
        raise UnsupportedModel(
            "the chat template changes the query or the document, or repeats them, which is not "
            "supported",
            hint=f"use a {CHAT_TEMPLATE_NAME} that writes first the query and then the document, "
            "both as they are",
        )

    def _is_right(self, template: PairTemplate) -> bool:
        instruction, query, document = _OTHER
        if template.instruction is None:
            return self.render(self.default_prompt, *_OTHER[1:]) == template.join(*_OTHER[1:])
        return self.render(instruction, query, document) == template.join(
            query, document, instruction
        )


def _open_renderers(checkpoint: Checkpoint, source: str | None) -> list[_Renderer]:
    """Return the ways in which the template may be called; none without a valid template."""
    config = read_transformer_config(checkpoint.weights)
    if source is None:
        return []
    try:
        template = ChatTemplate(source, special_tokens(checkpoint.weights))
    except ServeError:
        return []
    variables = _read_variables(config)
    has_generation_prompt = bool(variables.pop("add_generation_prompt", False))
    prompts, name = read_prompts(checkpoint)
    stated = (read_path(config, "modality_config.message") or {}).get("format")
    return [
        _Renderer(
            template=template,
            variables=tuple(variables.items()),
            has_generation_prompt=has_generation_prompt,
            is_structured=is_structured,
            default_prompt=prompts.get(name or "") or None,
        )
        for is_structured in (False, True)
        if stated not in ("flat", "structured") or is_structured == (stated == "structured")
    ]


def _read_variables(config: Mapping[str, Json]) -> dict[str, Json]:
    """Return the variables of the template. Raises UnsupportedModel for other settings there."""
    stated = read_path(config, "processing_kwargs.chat_template") or {}
    for name, value in stated.items():
        neutral = _SETTINGS.get(name)
        if neutral is not None and value not in neutral:
            raise UnsupportedModel(
                f"`processing_kwargs.chat_template` of the Transformer module sets `{name}`, which "
                "the build does not pass on",
                hint="remove it, and state its effect in tokenizer_config.json or the template",
            )
    return {name: value for name, value in stated.items() if name not in _SETTINGS}


def _split(text: str, instructed: str) -> Iterator[PairTemplate]:
    """Yield the templates that may have made `text`, the best first.

    `instructed` is the same pair after _INSTRUCTION in place of the default instruction. A template
    for which requests can choose the instruction is better than one with a fixed instruction.
    """
    if instructed.count(_INSTRUCTION) == 1:
        start, rest = instructed.split(_INSTRUCTION)
        default = text.removeprefix(start).removesuffix(rest)
        if start + default + rest == text and _QUERY in rest:
            yield from _split_pair(rest, start=start, instruction=default)
    yield from _split_pair(text, start="", instruction=None)


def _split_pair(rest: str, *, start: str, instruction: str | None) -> Iterator[PairTemplate]:
    """Yield the ways to remove white space from the contents. `rest` is the text from the query."""
    before_first, _, rest = rest.partition(_QUERY)
    before_second, found, end = rest.partition(_DOCUMENT)
    for strips, strips_instruction in product((False, True), repeat=2) if found else ():
        yield PairTemplate(
            start=start,
            instruction=instruction,
            before_first=before_first,
            before_second=before_second,
            end=end,
            strips=strips,
            strips_instruction=strips_instruction,
        )


def _omit_added_tokens(template: PairTemplate, tokenizer: Tokenizer) -> PairTemplate:
    """Remove from the start of the text what the tokenizer adds to every text, such as `<s>`.

    Raises UnsupportedModel if the tokenizer adds other tokens.
    """
    text = template.join(*_FILLERS)
    due = tokenizer.encode(text, add_special_tokens=False).ids
    own = tokenizer.encode(text).ids
    if own == due:
        return template
    added = "".join(tokenizer.id_to_token(each) or "" for each in own[: len(own) - len(due)])
    first = "start" if template.start else "before_first"
    shorter = getattr(template, first).removeprefix(added)
    template = template.model_copy(update={first: shorter})
    if tokenizer.encode(template.join(*_FILLERS)).ids != due:
        raise UnsupportedModel(
            "the tokenizer adds special tokens that the chat template of pairs does not have",
            hint="save the tokenizer without a post-processor that adds them",
        )
    return template


def _count_end_tokens(template: PairTemplate, tokenizer: Tokenizer) -> int:
    """Return how many last tokens do not depend on the contents."""
    first, second = (tokenizer.encode(template.join(each, each)).ids[::-1] for each in _FILLERS)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (left, right) in pairs if left != right), 0)
