from dataclasses import fields

import pytest

from das_verl.config import ConfigError, DasConfig


def test_the_shipped_defaults_are_valid_and_complete(das_section):
    config = DasConfig.parse(das_section)
    assert [f.name for f in fields(config)] == list(das_section)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"windo": 3}, r"das\.windo is not a setting; the settings are window, "),
        ({"window": -1}, r"das\.window=-1 is out of range; it must lie in \[1, 4096\]"),
        ({"window": 2.5}, r"das\.window=2\.5 must be a whole number"),
        ({"window": True}, r"das\.window=True must be a whole number"),
        ({"window": "many"}, r"das\.window='many' must be a whole number"),
        ({"max_draft": 0}, r"das\.max_draft=0 is out of range"),
        ({"max_draft": 129}, r"das\.max_draft=129 is out of range"),
        ({"verify_tokens": 0}, r"das\.verify_tokens=0 is out of range"),
        ({"policy": "fast"}, r"das\.policy='fast' must be one of solved, classes"),
        ({"policy": None}, r"das\.policy=None must be one of"),
        ({"classes": {"medium": 0.5}}, r"das\.classes\.long is missing"),
        ({"draft_sizes": [3, 1]}, r"das\.draft_sizes=\[3, 1\] must be rising whole numbers above 0, as in \[1,3,7\]"),
        ({"draft_sizes": [0, 1]}, r"das\.draft_sizes=\[0, 1\] must be rising"),
        ({"draft_sizes": []}, r"das\.draft_sizes=\[\] must be rising"),
        ({"draft_sizes": "1,3"}, r"das\.draft_sizes='1,3' must be rising"),
        ({"tree_gb": "high"}, r"das\.tree_gb='high' must be a number"),
        ({"tree_gb": float("nan")}, r"das\.tree_gb=nan is out of range"),
        ({"tree_gb": 0}, r"das\.tree_gb=0 is out of range"),
        ({"history": 4}, r"das\.history=4 must be a section with the settings gb, warm_start"),
        ({"history": {"gb": 0, "warm_start": None}}, r"das\.history\.gb=0 is out of range"),
        ({"history": {"gb": 1, "warm_start": 3}}, r"das\.history\.warm_start=3 must be a path, or null"),
        ({"history": {"gb": 1, "warm": None}}, r"das\.history\.warm is not a setting"),
        ({"history": {"gb": 1}}, r"das\.history\.warm_start is missing"),
    ],
)
def test_a_bad_setting_is_named_with_what_to_do(das_section, change, line):
    with pytest.raises(ConfigError, match=line):
        DasConfig.parse(das_section | change)


def test_a_missing_setting_is_named(das_section):
    del das_section["window"]
    with pytest.raises(ConfigError, match=r"das\.window is missing"):
        DasConfig.parse(das_section)
