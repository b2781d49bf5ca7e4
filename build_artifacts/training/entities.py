"""Tagged sentences about invented people: data for the accuracy gate of the entity model.

    python -m build_artifacts.training.entities > build_artifacts/data/entities.jsonl

No model is trained on these sentences. Templates and words are made for this purpose.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator, Mapping

_SENTENCES = 300
_SEED = 7

_GIVEN = (
    "Amara", "Ben", "Carla", "Dmitri", "Elena", "Farid", "Grace", "Hugo", "Ingrid", "James",
    "Kavya", "Liam", "Maria", "Noah", "Olga", "Pedro", "Quinn", "Rosa", "Samuel", "Tara",
    "Uma", "Victor", "Wendy", "Yusuf", "Zoe",
)  # fmt: skip
_SURNAMES = (
    "Adeyemi", "Brown", "Castillo", "Dvorak", "Evans", "Fischer", "Garcia", "Hughes", "Ivanova",
    "Johnson", "Kim", "Lopez", "Miller", "Nguyen", "O'Connor", "Patel", "Rossi", "Smith",
    "Tanaka", "Underwood", "Vargas", "Walker", "Young", "Zimmermann",
)  # fmt: skip
_STREETS = (
    "Maple Avenue", "Oak Street", "Cedar Way", "Main Street", "Lake View Road", "Elm Drive",
    "Sunset Boulevard", "Church Street", "Hill Road", "Park Avenue", "River Road", "Pine Court",
)  # fmt: skip
_PLACES = (
    ("Portland", "Oregon", "97205"), ("Austin", "Texas", "78701"), ("Denver", "Colorado", "80202"),
    ("Columbus", "Ohio", "43215"), ("Madison", "Wisconsin", "53703"), ("Boise", "Idaho", "83702"),
    ("Tucson", "Arizona", "85701"), ("Salem", "Oregon", "97301"), ("Nashville", "Tennessee",
    "37203"), ("Santa Fe", "New Mexico", "87501"), ("Baton Rouge", "Louisiana", "70801"),
    ("Sacramento", "California", "95814"), ("Albany", "New York", "12207"),
)  # fmt: skip
_HOSTS = ("example.com", "example.org", "mail.example.net")

# Words in braces, such as `{given}`, are entities. All other words have the tag `O`.
_TEMPLATES = (
    "My name is {given} {surname} .",
    "Please send the parcel to {given} {surname} , {building} {street} , {city} , {state} {zip} .",
    "{given} moved from {city} to {city2} in the spring .",
    "You can reach {given} at {email} after lunch .",
    "Dear {given} {surname} , thank you for your letter .",
    "The invoice goes to {building} {street} , {secondary} , {city} , {state} {zip} .",
    "I live at {building} {street} in {city} , {state} .",
    "Write to {email} or ask {given} {surname} .",
    "Our office is at {building} {street} , {secondary} , {city} .",
    "Her website is {url} and her email is {email} .",
    "Mr {surname} will meet {given} {surname2} in {city} tomorrow .",
    "The weather in the mountains was cold and clear .",
    "{given} and {given2} both grew up in {city} , {state} .",
    "Can you tell me how to bake bread at home ?",
    "Update my address : {building} {street} , {city} , {state} {zip} .",
    "The report by {surname} is online at {url} .",
    "The meeting takes two hours and costs nothing .",
)

EntityText = tuple[str, str]  # kind and text


def generate(rng: random.Random) -> Iterator[dict[str, list[str]]]:
    """Yield records of `tokens` and `tags` without end."""
    while True:
        entities = _draw_entities(rng)
        tokens: list[str] = []
        tags: list[str] = []
        for word in rng.choice(_TEMPLATES).split():
            kind, words = "", [word]
            if word.startswith("{"):
                kind, text = entities[word.strip("{}")]
                words = text.split()
            tokens += words
            tags += [f"{'I' if i else 'B'}-{kind}" if kind else "O" for i in range(len(words))]
        yield {"tokens": tokens, "tags": tags}


def _draw_entities(rng: random.Random) -> Mapping[str, EntityText]:
    given, given2 = rng.sample(_GIVEN, 2)
    surname, surname2 = rng.sample(_SURNAMES, 2)
    (city, state, zip_code), (city2, _, _) = rng.sample(_PLACES, 2)
    host = rng.choice(_HOSTS)
    draw_secondary: tuple[Callable[[], str], ...] = (
        lambda: f"Apartment {rng.randrange(1, 60)}",
        lambda: f"Suite {rng.randrange(100, 900)}",
        lambda: f"Unit {rng.choice(string.ascii_uppercase)}",
    )
    return {
        "given": ("GIVEN_NAME", given),
        "given2": ("GIVEN_NAME", given2),
        "surname": ("SURNAME", surname),
        "surname2": ("SURNAME", surname2),
        "building": ("BUILDING_NUMBER", str(rng.randrange(1, 9900))),
        "street": ("STREET_NAME", rng.choice(_STREETS)),
        "secondary": ("SECONDARY_ADDRESS", rng.choice(draw_secondary)()),
        "city": ("CITY", city),
        "city2": ("CITY", city2),
        "state": ("STATE", state),
        "zip": ("ZIP_CODE", zip_code),
        "email": ("EMAIL", f"{given}.{surname.replace(chr(39), '')}@{host}".lower()),
        "url": ("URL", f"https://www.{host}/{surname.replace(chr(39), '')}".lower()),
    }


def main() -> None:
    records = generate(random.Random(_SEED))
    for _ in range(_SENTENCES):
        print(json.dumps(next(records)))


if __name__ == "__main__":
    main()
