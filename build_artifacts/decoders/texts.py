"""What a decoder is asked by the gate: passages to read, and prompts to go on from.

Passages are prose of 60 to 160 tokens, in which the next word is now clear and now open.
"""

from __future__ import annotations

PASSAGES: tuple[str, ...] = (
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

# Asked as a user would ask a chat model, and of any other as a text to go on from.
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
