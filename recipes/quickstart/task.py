"""The quickstart's task: greatest common divisors by Euclid's subtractions, written out.

Everything known about the task lives here: questions (reasoning-gym's ``gcd``), worked solutions,
the reward. verl loads this file by its path, so it imports nothing of the repository.

The number of subtractions is the sum of the partial quotients of ``a / b``, whose law has a heavy
tail: response lengths spread widely, and a prompt does not tell its own before it has been sampled.
"""

import itertools
import re
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import reasoning_gym

DATA_SOURCE = "reasoning_gym/gcd"
# Chance that a subtraction of two equal numbers comes out off by one, before RL.
SLIP = 0.25


class Stratum(NamedTuple):
    """A class of prompts by the length of their solution, in characters (about one token each)."""

    name: str
    share: int  # prompts among each CYCLE consecutive ones
    max_value: int
    shortest: int
    longest: int


STRATA = (
    Stratum("short", 8, 99, 20, 60),
    Stratum("medium", 5, 199, 60, 150),
    Stratum("long", 2, 399, 150, 400),
    Stratum("very long", 1, 399, 500, 1000),
)
CYCLE = sum(stratum.share for stratum in STRATA)

_score = reasoning_gym.get_score_answer_fn("gcd")


def solve(a: int, b: int, rng: Random | None = None) -> str:
    """
    Write out the subtractions that lead to the greatest common divisor.

    Parameters
    ----------
    a, b : int
        The two numbers.
    rng : random.Random, optional
        Makes some subtractions off by one, the error then carried on. A common divisor above 1
        never survives a single slip. The chance falls with the ratio of the two numbers, so that
        a long run of subtractions of one small number costs no more than a few other steps.

    Returns
    -------
    str
        One subtraction a line, and the answer on the last.
    """
    lines = []
    while a != b and 1 not in (a, b):
        a, b = max(a, b), min(a, b)
        rest = a - b
        if rng and rng.random() < SLIP * b / a:
            rest = max(1, rest + rng.choice((-1, 1)))
        lines.append(f"{a}-{b}={rest}")
        a, b = b, rest
    return "\n".join([*lines, f"GCD: {min(a, b)}"])


def problems(seed: int, distinct: bool = False) -> Iterator[dict]:
    """
    Draw reasoning-gym entries without end, every `CYCLE` of them in the proportions of `STRATA`.

    Parameters
    ----------
    seed : int
        The same seed gives the same entries.
    distinct : bool
        Never repeat a pair of numbers: for a few hundred entries, as short solutions are few.

    Yields
    ------
    dict
        reasoning-gym's entry (``question``, ``answer``, ``metadata``), with ``stratum`` and
        ``solution`` added.
    """
    streams = [_entries(stratum, seed * len(STRATA) + i, distinct) for i, stratum in enumerate(STRATA)]
    turns = [stream for stream, stratum in zip(streams, STRATA, strict=True) for _ in range(stratum.share)]
    rng = Random(seed)
    while True:
        rng.shuffle(turns)
        yield from map(next, turns)


def _entries(stratum: Stratum, seed: int, distinct: bool) -> Iterator[dict]:
    seen = set()
    # reasoning-gym seeds entry i with seed + i: the shift keeps the streams apart.
    entries = reasoning_gym.create_dataset(
        "gcd", min_value=2, max_value=stratum.max_value, seed=seed << 32, size=1 << 32
    )
    for entry in map(entries.__getitem__, itertools.count()):
        numbers = frozenset(entry["metadata"]["numbers"])
        if entry["answer"] == "1" or len(numbers) < 2 or (distinct and numbers in seen):
            continue
        solution = solve(*numbers)
        if stratum.shortest <= len(solution) < stratum.longest:
            seen.add(numbers)
            yield entry | {"stratum": stratum.name, "solution": solution}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs
) -> float:
    """
    Score a response, in the form of verl's ``custom_reward_function``.

    Parameters
    ----------
    data_source, extra_info, **kwargs
        Unused.
    solution_str : str
        The response.
    ground_truth : str
        reasoning-gym's answer.

    Returns
    -------
    float
        1 if the response ends in the right answer, else 0.
    """
    answer = re.search(r"GCD: (\d+)\s*$", solution_str)
    return float(answer is not None and _score(answer[1], {"answer": ground_truth}) == 1)
