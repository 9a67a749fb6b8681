"""Reward for the questions of ``make_data.py``: the number after the last ``####``, as GSM8K writes answers."""

import re


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None, **kwargs) -> float:
    """Return 1 if the response ends in the right answer, else 0; in the form of verl's ``custom_reward_function``."""
    answers = re.findall(r"####\s*(-?[\d.,]*\d)", solution_str)
    return float(bool(answers) and float(answers[-1].replace(",", "")) == float(ground_truth))
