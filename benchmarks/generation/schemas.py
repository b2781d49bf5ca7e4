"""Fifty prompts with one JSON schema each: ten kinds of task, five subjects per kind.

Every schema bounds its answer: strings and arrays have a maximum length, numbers are integers with
a minimum and a maximum, objects are closed. Every answer fits into `MAX_TOKENS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

MAX_TOKENS = 200

Schema = dict[str, Any]


class SchemaTask(NamedTuple):
    """A named prompt and the schema of its answer."""

    name: str  # kind of task and number, such as `review_1`
    prompt: str
    schema: Schema


PromptAndSchema = tuple[str, Schema]


def build_schema_tasks(rng: random.Random) -> tuple[SchemaTask, ...]:
    """Build all tasks. Draw limits and the order of choices at random."""
    return tuple(
        SchemaTask(f"{kind}_{number}", *build(subject, rng))
        for kind, (build, subjects) in KINDS.items()
        for number, subject in enumerate(subjects, 1)
    )


def _closed(**properties: Schema) -> Schema:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(max_length: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": max_length}


def _pattern(pattern: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern}$"}


def _integer(minimum: int, maximum: int) -> Schema:
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


def _choice(rng: random.Random, choices: Sequence[str]) -> Schema:
    return {"type": "string", "enum": rng.sample(choices, len(choices))}


def _list(items: Schema, min_items: int, max_items: int) -> Schema:
    return {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}


YES_OR_NO: Schema = {"type": "boolean"}


def _review(product: str, rng: random.Random) -> PromptAndSchema:
    schema = _closed(
        product={"const": product},
        stars=_integer(1, rng.choice((5, 10))),
        recommended=YES_OR_NO,
        summary=_text(rng.randint(30, 60)),
    )
    return f"Write a short review of the {product} as JSON.", schema


def _ticket(complaint: str, rng: random.Random) -> PromptAndSchema:
    schema = _closed(
        team=_choice(rng, ("billing", "delivery", "repairs", "accounts")),
        priority=_choice(rng, ("low", "normal", "high")),
        needs_a_person=YES_OR_NO,
        summary=_text(rng.randint(30, 60)),
    )
    return f'A customer writes: "{complaint}" Sort this message, as JSON.', schema


def _recipe(dish: str, rng: random.Random) -> PromptAndSchema:
    ingredient = _closed(name=_text(16), grams=_integer(1, rng.choice((500, 1_000))))
    schema = _closed(
        dish={"const": dish},
        serves=_integer(1, rng.randint(4, 8)),
        minutes=_integer(5, rng.randint(60, 180)),
        ingredients=_list(ingredient, 2, 3),
    )
    return f"What do I need to cook {dish}? Answer with JSON.", schema


def _appointment(occasion: str, rng: random.Random) -> PromptAndSchema:
    names = rng.sample(("Ada", "Bela", "Chen", "Dora", "Emil", "Farah", "Goran"), 4)
    schema = _closed(
        title=_text(rng.randint(20, 40)),
        date=_pattern(r"2027-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"),
        time=_pattern(r"([01][0-9]|2[0-3]):[0-5][0-9]"),
        guests=_list(_choice(rng, names), 1, rng.randint(2, 4)),
        online=YES_OR_NO,
    )
    prompt = f"Plan {occasion} with {', '.join(names)} in March 2027. Give the appointment as JSON."
    return prompt, schema


def _person(note: str, rng: random.Random) -> PromptAndSchema:
    schema = _closed(
        name=_closed(first=_text(14), last=_text(14)),
        age={"anyOf": [_integer(0, rng.randint(99, 120)), {"type": "null"}]},
        job=_text(rng.randint(16, 24)),
        city={"anyOf": [_text(16), {"type": "null"}]},
    )
    return f"{note} Put what you know of this person into JSON.", schema


def _opinion(comment: str, rng: random.Random) -> PromptAndSchema:
    feeling = _choice(rng, ("positive", "neutral", "negative"))
    aspect = _closed(
        about=_choice(rng, ("food", "service", "price", "place", "noise")),
        feeling={"$ref": "#/$defs/feeling"},
    )
    schema = _closed(
        feeling={"$ref": "#/$defs/feeling"},
        sure_percent=_integer(0, 100),
        aspects=_list(aspect, 1, rng.randint(2, 4)),
    )
    prompt = f'"{comment}" What does this guest feel, and about what? Answer with JSON.'
    return prompt, {"$defs": {"feeling": feeling}, **schema}


def _order(goods: str, rng: random.Random) -> PromptAndSchema:
    card = _closed(by={"const": "card"}, last_digits=_pattern("[0-9]{4}"))
    later = _closed(by={"const": "invoice"}, within_days=_integer(7, rng.choice((14, 30, 60))))
    line = _closed(
        article=_choice(rng, goods.split(" and ")), count=_integer(1, rng.randint(6, 99))
    )
    schema = _closed(
        number=_pattern("[A-Z]{2}-[0-9]{5}"),
        lines=_list(line, 1, 2),
        payment={"anyOf": [card, later]},
    )
    return f"Make up an order of {goods} in a web shop, as JSON.", schema


def _quiz(field: str, rng: random.Random) -> PromptAndSchema:
    choices = rng.randint(2, 4)
    schema = _closed(
        question=_text(rng.randint(30, 45)),
        choices=_list(_text(10), choices, choices),
        right={"type": "integer", "enum": list(range(choices))},
        level=_choice(rng, ("easy", "medium", "hard")),
    )
    prompt = f"Make up a quiz question about {field} with {choices} choices, as JSON."
    return prompt, schema


def _command(utterance: str, rng: random.Random) -> PromptAndSchema:
    rooms = ("kitchen", "bedroom", "hall", "bath", "office")
    switch = _closed(do={"const": "switch"}, on=YES_OR_NO)
    level = _closed(do={"const": "set"}, percent=_integer(0, 100))
    wait = _closed(do={"const": "wait"}, minutes=_integer(1, rng.randint(30, 240)))
    schema = _closed(
        device=_choice(rng, ("lamp", "heating", "blinds", "speaker")),
        room=_choice(rng, rooms),
        steps=_list({"anyOf": [switch, level, wait]}, 1, 3),
    )
    return f'Someone says to their house: "{utterance}" What is it to do? As JSON.', schema


def _forecast(place: str, rng: random.Random) -> PromptAndSchema:
    low = rng.randint(-30, 0)
    day = _closed(
        sky=_choice(rng, ("clear", "cloudy", "rain", "snow", "fog")),
        low=_integer(low, 20),
        high=_integer(low, 45),
        rain_percent=_integer(0, 100),
    )
    days = rng.randint(2, 3)
    schema = _closed(place={"const": place}, days=_list(day, days, days))
    return f"Make up the weather in {place} for {days} days, as JSON.", schema


KINDS: Mapping[str, tuple[Callable[[str, random.Random], PromptAndSchema], tuple[str, ...]]] = {
    "review": (
        _review,
        ("travel kettle", "folding bicycle", "desk lamp", "rain jacket", "chess clock"),
    ),
    "ticket": (
        _ticket,
        (
            "I was charged twice for the same book.",
            "The parcel has been in Lyon for nine days.",
            "My washing machine leaks since yesterday!",
            "How do I change the e-mail address of my account?",
            "The screen came broken and nobody answers the phone.",
        ),
    ),
    "recipe": (
        _recipe,
        ("lentil soup", "apple pancakes", "mushroom risotto", "potato salad", "fish curry"),
    ),
    "appointment": (
        _appointment,
        ("a birthday", "a budget meeting", "a hike", "a rehearsal", "a job interview"),
    ),
    "person": (
        _person,
        (
            "Maria Keller, 34, repairs violins in Graz.",
            "Tom Okafor has driven the night bus for twenty years.",
            "Dr. Lin, born in Taipei, is the youngest surgeon of the clinic.",
            "Old Jens still opens his bakery in Aarhus at four.",
            "Priya Nair is 27 and teaches physics.",
        ),
    ),
    "opinion": (
        _opinion,
        (
            "The soup was wonderful, but we waited an hour.",
            "Far too loud, and twelve euros for a salad.",
            "Nice view. Nothing else to say.",
            "Our waiter was so kind that we forgot about the cold fish.",
            "Cheap, quick and good: we shall come again.",
        ),
    ),
    "order": (
        _order,
        (
            "pencils and notebooks",
            "tea and honey",
            "tulip bulbs and spades",
            "screws and drills",
            "socks and wool",
        ),
    ),
    "quiz": (_quiz, ("planets", "rivers", "music", "birds", "old Rome")),
    "command": (
        _command,
        (
            "It is far too bright in here.",
            "I go to bed in half an hour.",
            "Make it warm for my bath at seven.",
            "Play something quiet while I work.",
            "Nobody is at home until the evening.",
        ),
    ),
    "forecast": (_forecast, ("Bergen", "Nairobi", "Quito", "Sapporo", "Adelaide")),
}
