"""From a generator's replies to the answers of summarization and its relatives."""

from __future__ import annotations

from typing import Any

from deployments.ingress.families.text2text.messages import KEYS
from deployments.ingress.families.text2text.questions import TextToText
from deployments.ingress.families.text_generation.answers import answers_of
from deployments.ingress.families.text_generation.messages import Generated
from deployments.ingress.generation import GenerationReply

# Spaces that tokenizers of words leave, in the order in which transformers takes them out.
LOOSE = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
PLAIN = "generated_text"


def told_answers(reply: GenerationReply, question: TextToText, *, both: bool) -> list[Any]:
    """An answer for each text; a list of them for each where several texts have several.

    With `both` the text also has the name that it has in text generation.
    """
    told = [
        [_told(one, question, both=both) for one in answers]
        for answers in answers_of(reply, question.asked)
    ]
    if not question.asked.listed:
        return told[0]
    if (question.parameters.num_return_sequences or 1) > 1:
        return told
    return [answer for (answer,) in told]


def _told(answer: Generated, question: TextToText, *, both: bool) -> dict[str, Any]:
    text = answer["generated_text"]
    if question.parameters.clean_up_tokenization_spaces:
        text = tidied(text)
    told: dict[str, Any] = {KEYS[question.task]: text}
    if both or "details" in answer:
        told[PLAIN] = text
    if "details" in answer:
        told["details"] = answer["details"]
    return told


def tidied(text: str) -> str:
    """`text` without the spaces that stand before punctuation and within contractions."""
    for loose in LOOSE:
        text = text.replace(loose, loose.strip())
    return text
