"""The text that tiny_llama learns: short documents, made from a seed, that can be checked.

A document is a prompt with its right completions. Most prompts have only one: a sum, a list in
order, the answer to a question about a story. A story may go on in any of 120 ways, each with its
own persons, and each thing in its own colour.

Run `python examples/tiny_corpus.py` to see one document of each task.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import NamedTuple

GIRLS = ("Mia", "Anna", "Lily", "Rosa", "Emma", "Nora", "Zoe", "Kate")
BOYS = ("Tom", "Sam", "Ben", "Max", "Leo", "Jack", "Finn", "Paul")
NAMES = GIRLS + BOYS
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "pink", "brown", "purple", "grey")
THINGS = (
    "ball",
    "kite",
    "drum",
    "hat",
    "boat",
    "book",
    "box",
    "cup",
    "bag",
    "bell",
    "lamp",
    "coat",
    "doll",
    "car",
)
FRUITS = ("apples", "pears", "plums", "nuts", "cakes", "shells", "stones", "coins", "stars", "eggs")
PLACES = ("park", "garden", "forest", "river", "market", "school", "beach", "farm", "hill", "lake")
WORDS = (*COLOURS, *THINGS, *FRUITS, *PLACES)
LETTERS = "abcdefghijklmnopqrstuvwxyz"

OPENINGS = (
    "{Hero} had a {thing}. {Friend} had a {other}.",
    "Once upon a time, {Hero} had a {thing} and {Friend} had a {other}.",
    "{Hero} got a {thing}. {His} friend {Friend} got a {other}.",
)
MIDDLES = (
    "One windy day {Hero} took the {thing} to the {place}. {He} let it go and it was lost. "
    "{He} looked and looked. Then {Friend} came and found the {thing} under a tree.",
    "One day they met at the {place}. "
    "{Hero} showed {Friend} the {thing}, and {Friend} showed {Hero} the {other}. "
    "They played with both until the sun went down.",
    "But then the {other} broke, and {Friend} was sad. {Hero} went to the {place} to see {Friend}. "
    "{He} sat down and fixed the {other} with some glue.",
    "The next day {Hero} wanted to have the {other}, and {Friend} wanted to have the {thing}. "
    "So they went to the {place} and swapped. "
    "Now {Hero} has the {other} and {Friend} has the {thing}.",
)
ENDINGS = (
    '"Thank you, {Friend}," said {Hero}. They went home together. The end.',
    "{Hero} and {Friend} were very happy and went home. The end.",
    "After that day {Hero} and {Friend} were best friends. The end.",
)


class Document(NamedTuple):
    task: str
    prompt: str
    completions: tuple[str, ...]  # all that are right


def add(random: Random) -> tuple[str, str]:
    a, b = random.randrange(100), random.randrange(100)
    return f"{a} + {b} =", f" {a + b}"


def subtract(random: Random) -> tuple[str, str]:
    b, a = sorted((random.randrange(100), random.randrange(100)))
    return f"{a} - {b} =", f" {a - b}"


def word_problem(random: Random) -> tuple[str, str]:
    hero, friend = random.sample(NAMES, 2)
    fruit, a, b = random.choice(FRUITS), random.randrange(2, 50), random.randrange(2, 50)
    prompt = f"{hero} has {a} {fruit}. {friend} gives {hero} {b} more. Now {hero} has"
    return prompt, f" {a + b} {fruit}."


def count(random: Random) -> tuple[str, str]:
    step = random.choice((1, 1, 1, 2, 5, 10))
    first = random.randrange(100)
    last = first + step * random.randrange(3, random.choice((8, 8, 16, 32)))
    numbers = list(range(first, last + 1, step))
    if random.random() < 0.25:
        numbers.reverse()
    by = f" by {step}" if step > 1 else ""
    return f"Count{by} from {numbers[0]} to {numbers[-1]}:", f" {', '.join(map(str, numbers))}."


def sort(random: Random) -> tuple[str, str]:
    numbers = random.sample(range(100), random.randint(3, 6))
    return f"Sort: {' '.join(map(str, numbers))} =", f" {' '.join(map(str, sorted(numbers)))}"


def reverse(random: Random) -> tuple[str, str]:
    letters = random.choices(LETTERS, k=random.randint(3, 8))
    return f"Reverse: {' '.join(letters)} =", f" {' '.join(reversed(letters))}"


def copy(random: Random) -> tuple[str, str]:
    text = " ".join(random.sample(WORDS, random.randint(3, 16)))
    return f"Repeat: {text} =", f" {text}"


def chant(random: Random) -> tuple[str, str]:
    times = random.randint(2, 9)
    text = " ".join(random.sample(WORDS, random.randint(2, 4)))
    return f"Say {times} times: {text} =", f" {', '.join([text] * times)}."


def question(random: Random) -> tuple[str, str]:
    name, colour, thing, fruit, place = map(random.choice, (NAMES, COLOURS, THINGS, FRUITS, PLACES))
    he = "she" if name in GIRLS else "he"
    facts = (
        f"{name} lives near the {place}.",
        f"{he.title()} has a {colour} {thing}.",
        f"{he.title()} likes {fruit}.",
    )
    ask, answer = random.choice(
        (
            (f"Where does {he} live?", f"near the {place}"),
            (f"Who has the {thing}?", name),
            (f"What colour is {name}'s {thing}?", colour),
            (f"What does {name} have?", f"a {colour} {thing}"),
            (f"Who likes {fruit}?", name),
            (f"What does {name} like?", fruit),
        )
    )
    return f"{' '.join(facts)}\nQuestion: {ask}\nAnswer:", f" {answer}"


def story(random: Random) -> tuple[str, ...]:
    hero, friend = random.sample(NAMES, 2)
    colours, things = random.sample(COLOURS, 2), random.sample(THINGS, 2)
    thing, other = (" ".join(pair) for pair in zip(colours, things, strict=True))
    he, his = ("she", "her") if hero in GIRLS else ("he", "his")
    slots = {"Hero": hero, "Friend": friend, "thing": thing, "other": other}
    slots |= {"he": he, "He": he.title(), "His": his.title()}
    return random.choice(OPENINGS).format(**slots), *(
        f" {middle} {ending}".format(place=place, **slots)
        for middle, ending, place in product(MIDDLES, ENDINGS, PLACES)
    )


def retell(random: Random) -> tuple[str, str]:
    opening, *endings = story(random)
    text = opening + random.choice(endings)
    old = next(word for word in re.findall(r"\w+", text) if word in NAMES)
    alike = GIRLS if old in GIRLS else BOYS
    new = random.choice([name for name in alike if name not in text])
    return f"{text}\nTell it again with {new} for {old}:", f" {text.replace(old, new)}"


TASKS: dict[Callable[[Random], tuple[str, ...]], float] = {  # each with its share
    add: 0.24,
    subtract: 0.17,
    word_problem: 0.08,
    count: 0.09,
    sort: 0.09,
    reverse: 0.06,
    copy: 0.06,
    chant: 0.05,
    question: 0.08,
    story: 0.06,
    retell: 0.02,
}


def documents(random: Random, held_out: bool = False) -> Iterator[Document]:
    """Endless documents of all tasks, either for training or held out of it."""
    tasks, shares = list(TASKS), list(TASKS.values())
    while True:
        (task,) = random.choices(tasks, shares)
        prompt, *completions = task(random)
        if is_held_out(prompt) == held_out:
            yield Document(task.__name__, prompt, tuple(completions))


def is_held_out(prompt: str) -> bool:
    """True for one prompt in 20. Prompts of the same words go together, as 2 + 3 = and 3 + 2 =."""
    words = " ".join(sorted(prompt.split()))
    return zlib.crc32(words.encode()) % 20 == 0


if __name__ == "__main__":
    for task in TASKS:
        prompt, completion, *_ = task(Random(0))
        print(f"[{task.__name__}] {prompt}{completion}\n")
