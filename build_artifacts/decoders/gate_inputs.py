"""Token ids of the passages and prompts for the accuracy gate and for calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from build_artifacts.checkpoints.decoders import read_chat_templates, special_tokens
from build_artifacts.errors import UnsupportedModel
from build_artifacts.types import Tokens
from deployments.artifacts.manifest import CHAT_TEMPLATE_NAME
from deployments.errors import InputTooLong, InvalidField
from deployments.generation.chat_template import ChatTemplate
from deployments.messages import Chat
from deployments.tokenization.encodings import open_tokenizer

GATE_PASSAGES: tuple[str, ...] = (
    "The lighthouse on the northern cape was automated in the spring of 1984. Until then three "
    "keepers had lived there in turns of six weeks, and the one who was on duty wrote the weather "
    "into a thick green book every four hours. When the last of them left, he took the book with "
    "him. It lies in the town museum today, open on a page from a January night, when the wind "
    "was so strong that the ink ran across the paper.",
    "Water boils at one hundred degrees Celsius at sea level. On a high mountain the pressure of "
    "the air is lower, so that the water boils at a lower temperature, and an egg takes longer to "
    "cook. In a closed pot the opposite happens: the steam cannot escape, the pressure rises, and "
    "the food is done in half of the time.",
    "My sister keeps bees behind the house. In May, when the cherry trees are in bloom, she gets "
    "up before sunrise to look after the hives. She says that bees do not mind visitors as long as "
    "they move slowly and do not stand in the way. I have been stung only once, and that was my "
    "own fault: I had left the gate open, and the dog came in.",
    "A computer stores numbers in binary form, that is, as a sequence of ones and zeros. Each "
    "digit is called a bit, and eight bits make a byte. With one byte you can count from zero to "
    "two hundred and fifty-five. Larger numbers need more bytes, and negative numbers need a rule "
    "that says which of the patterns stand for them.",
    '"You are late again," said the baker without looking up. "The train was late," said Tom. '
    '"The train was late yesterday, and it was late on Monday. Perhaps you should take an earlier '
    'train." Tom hung his coat behind the door and washed his hands. There was no earlier train, '
    "and they both knew it, but neither of them said so.",
    "In the year 1905 a young clerk at the patent office in Bern published four papers that "
    "changed physics. One of them explained why light sets electrons free from a metal, another "
    "one why grains of pollen dance in water. The third said that time passes more slowly for a "
    "clock that moves, and the fourth that mass and energy are two names for the same thing.",
    "To change a flat tyre, park the car on level ground and put the handbrake on. Loosen the nuts "
    "of the wheel before you lift the car with the jack. Take the wheel off, put the spare one on "
    "in its place, and tighten the nuts by hand. Then let the car down and tighten them again, "
    "always going across from one nut to the opposite one.",
    "The first snow came in the second week of November. The children heard it before they saw it, "
    "or rather they heard nothing at all: no cars, no steps, no birds. By eight o'clock the school "
    "had called to say that the buses would not run. By nine there were two snowmen in front of "
    "the house, one of them with a real hat.",
    "A good question to ask of any map is what it leaves out. A map of the underground shows the "
    "order of the stations and where the lines cross, but not how far apart they are. A map for "
    "sailors shows every rock below the water and almost nothing of the land. Neither of them is "
    "wrong. Each shows what somebody needs to know, and no more than that.",
    "Dear Mrs Lindqvist, thank you for your letter of the third of March. I am sorry to hear that "
    "the washing machine has stopped working after only five months. As it is still under "
    "guarantee, we will repair it free of charge. Our technician will call you this week to make "
    "an appointment. Please keep the receipt at hand, because he will ask to see it. Yours "
    "sincerely, the customer service.",
    "The heart of an adult beats about seventy times a minute when the body is at rest. During "
    "hard work it may beat more than twice as fast, because the muscles need more oxygen, which "
    "the blood carries to them from the lungs. Athletes often have a slow pulse: their hearts are "
    "larger, and move more blood with every single beat.",
    "When the committee met again in the afternoon, nobody wanted to be the first to speak. The "
    "numbers were on the table, and they were worse than anyone had expected. In the end it was "
    "the treasurer who broke the silence. There were, he said, only two ways to go on: either they "
    "sold the old theatre, or they found somebody who was willing to pay for a new roof.",
)

# Requests to a chat model. Other models continue them as the beginning of a text.
PROMPTS: tuple[str, ...] = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in one sentence why the sky is blue.",
    "List three fruits that are red.",
    "How do I boil an egg?",
    "Translate to German: Good morning, my friend.",
    "What is 12 plus 30?",
    "Tell me a fact about whales.",
)

# Calibration data, disjoint from the gate's data. The largest value of each channel sets its scale,
# so the texts cover many domains.
CALIBRATION_PASSAGES: tuple[str, ...] = (
    "The city grew around a small fort on the river. By the year 1200 it had become a place of "
    "trade between north and south, with a large market where wool, salt and amber were sold. Its "
    "walls were pulled down in 1786, and the stones went into the new harbour.",
    "Green plants use sunlight to make their own food from carbon dioxide and water. This happens "
    "in the chloroplasts, which contain a pigment called chlorophyll; oxygen is what is left over. "
    "At night, when there is no light, plants breathe as animals do.",
    "Tomato soup for four: heat two tablespoons of olive oil in a large pot, add 1 chopped onion "
    "and cook it for 5 minutes. Stir in 2 cloves of garlic, 800 g of tomatoes, 500 ml of stock and "
    "a pinch of sugar. Simmer for 20 minutes, then blend.",
    "def fibonacci(n: int) -> int:\n"
    '    """The n-th number, counted from zero."""\n'
    "    a, b = 0, 1\n"
    "    for _ in range(n):\n"
    "        a, b = b, a + b\n"
    "    return a\n\n\n"
    "print([fibonacci(i) for i in range(10)])  # [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]\n",
    '{"order": 48213, "customer": {"name": "A. Meyer", "city": "Graz"}, "items": [{"sku": '
    '"KB-104", "price": 39.9, "count": 2}, {"sku": "MS-7", "price": 12.5, "count": 1}], "paid": '
    'true, "note": null}',
    "# Release notes\n\n## 2.3.0 (2021-04-17)\n\n- **Fixed**: a crash of empty lists (#412)\n"
    "- **Added**: `--quiet`, see https://example.org/docs/cli?version=2.3&lang=en#quiet\n\n"
    "| size | before | after |\n|---|---|---|\n| 10 MB | 1.2 s | 0.4 s |\n",
    "Der Zug nach Hamburg fährt heute von Gleis 7. ¿Dónde está la biblioteca? Elle a dit qu'elle "
    "viendrait demain, peut-être à huit heures. 今日はいい天気ですね。 Привет, как дела? 🙂🚀",
    "Let f(x) = 3x^2 - 12x + 7. Its derivative is f'(x) = 6x - 12, which is zero at x = 2, so that "
    "the least value is f(2) = 12 - 24 + 7 = -5. For x > 2 the function rises; hence 0.5 < x < 3.5 "
    "holds at both roots, and their sum is 4.",
    "WHEREAS the Tenant has asked for an EXTENSION of the term, and the Landlord is WILLING to "
    "grant it; NOW, THEREFORE, the parties agree: (a) the rent is $1,450.00 per month, due on the "
    "1st; (b) notice must be given in writing at least sixty (60) days before.",
    "ok so i tried it again lol... still doesnt work!!! any ideas?? thx :)\n\n> did u restart?\n\n"
    "yes, twice. same error: `ConnectionResetError: [Errno 104] Connection reset by peer`",
)
CALIBRATION_PROMPTS: tuple[str, ...] = (
    "Who wrote Hamlet, and when?",
    "Write a function in Python that reverses a string, and explain each line.",
    "Summarise in three bullet points why regular sleep matters.",
    "My order #48213 has not arrived yet. Please write a polite e-mail to the shop.",
)

_MAX_ANSWER_TOKENS = 32
_TEMPLATE_HINT = "correct the template, or remove it from the checkpoint"


class GateInputs(NamedTuple):
    """Token ids of the texts that the reference model and every candidate run on."""

    passages: tuple[Tokens, ...]
    prompts: tuple[Tokens, ...]


def max_answer_tokens(max_tokens: int) -> int:
    """Return the maximum answer length in tokens for a model with a context of `max_tokens`."""
    return min(_MAX_ANSWER_TOKENS, max_tokens // 2)


def load_gate_inputs(weights: Path, max_tokens: int, *, has_encoder: bool) -> GateInputs:
    """Tokenize passages and prompts and truncate them to the context.

    A chat template, if there is one, formats the prompts of a decoder-only model. These prompts
    lose tokens at their start if an answer would not fit in the context. For an encoder-decoder
    model, the passages become prompts, because its encoder reads passages and prompts alike.

    Raises UnsupportedModel for an unusable chat template.
    """
    if not has_encoder:
        return _tokenize_inputs(weights, max_tokens, GATE_PASSAGES, PROMPTS)
    tokenizer = open_tokenizer(weights)
    sources = (tokenizer.encode(text).ids for text in (*GATE_PASSAGES, *PROMPTS))
    return GateInputs((), tuple(truncate_source(ids, max_tokens) for ids in sources))


def load_calibration_inputs(weights: Path, max_tokens: int) -> tuple[Tokens, ...]:
    """Tokenize the calibration texts, which are disjoint from the gate's texts.

    Raises UnsupportedModel for an unusable chat template.
    """
    inputs = _tokenize_inputs(weights, max_tokens, CALIBRATION_PASSAGES, CALIBRATION_PROMPTS)
    return (*inputs.passages, *inputs.prompts)


def _tokenize_inputs(
    weights: Path, max_tokens: int, passages: Sequence[str], prompts: Sequence[str]
) -> GateInputs:
    tokenizer = open_tokenizer(weights)
    formatted, is_chat = _format_prompts(weights, prompts)
    max_prompt_tokens = max_tokens - max_answer_tokens(max_tokens)
    encoded = [tokenizer.encode(text, add_special_tokens=not is_chat).ids for text in formatted]
    if is_chat and not all(encoded):
        raise UnsupportedModel(
            "the accuracy gate cannot format its prompts: the chat template renders no tokens",
            hint=_TEMPLATE_HINT,
        )
    return GateInputs(
        tuple(tuple(tokenizer.encode(text).ids[:max_tokens]) for text in passages),
        tuple(tuple(ids[-max_prompt_tokens:]) for ids in encoded),
    )


def truncate_source(ids: Sequence[int], max_tokens: int) -> Tokens:
    """Truncate to `max_tokens` but keep the last token, the end-of-source token."""
    return tuple(ids) if len(ids) <= max_tokens else (*ids[: max_tokens - 1], ids[-1])


def _format_prompts(weights: Path, prompts: Sequence[str]) -> tuple[Sequence[str], bool]:
    """Return the prompts as model input, and whether the chat template formatted them."""
    template = read_chat_templates(weights).get(CHAT_TEMPLATE_NAME)
    if template is None:
        return prompts, False
    chats = [Chat(({"role": "user", "content": prompt},)) for prompt in prompts]
    try:
        served = ChatTemplate(template, special_tokens(weights))
        return [served.render(chat) for chat in chats], True
    except (InvalidField, InputTooLong) as exc:
        raise UnsupportedModel(
            f"the accuracy gate cannot format its prompts: {exc}",
            hint=_TEMPLATE_HINT,
        ) from exc
