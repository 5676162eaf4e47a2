"""Every sentence that a report can say is said by some ranks, and reads well."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import overlap_core
from overlap_core._words import bytes_apart_in_words, bytes_in_words

from .reasons import SCENARIOS
from .sentences import matches, sentences_of

PACKAGE = Path(overlap_core.__file__).parent
MODULES = (
    *("verdicts", "pipeline", "following", "views", "report/words", "builtin/ladder"),
    *("ranks/common_order", "ranks/crossings", "ranks/differences", "skeleton/skeleton"),
    *("ranks/notices", "ranks/scope_messages", "ranks/store"),
    *("ranks/ends", "skeleton/merge"),
)
"""Where the reasons of modes, gathers and notes are worded."""
NO_REASONS = {
    "not negotiated": "stands for a mode until there is one; no way leads out of there",
    "registered ops {}": "a name in a vote",
    "rank {} cannot learn whether the ranks reordered this graph ({}), so it may compile no order: "
    "look for the rank or the connection to the job's store that was lost": "is raised",
    "the order has {}": "is logged and kept from the order",
}
"""Text that no report shows -> why."""

SENTENCES = [
    pytest.param(module, sentence, id=f"{module}:{line}")
    for module in MODULES
    for sentence, line in sentences_of(PACKAGE / f"{module}.py").items()
    if sentence not in NO_REASONS
]


@pytest.fixture(scope="module")
def said() -> list[str]:
    return [text for scenario in SCENARIOS for text in scenario()]


@pytest.mark.parametrize(("module", "sentence"), SENTENCES)
def test_every_reason_is_given_by_some_ranks(said: list[str], module: str, sentence: str) -> None:
    assert matches(sentence, said), f"no scenario of tests/report/reasons.py says {sentence!r}"


def test_the_list_of_what_is_no_reason_is_up_to_date() -> None:
    known = {s for module in MODULES for s in sentences_of(PACKAGE / f"{module}.py")}
    assert known >= set(NO_REASONS)


def test_a_sentence_that_nobody_says_is_found(said: list[str], tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        '"""A docstring of words."""\n'
        "def f(x, logger):\n"
        '    """Another one."""\n'
        '    logger.warning("for the log %s", x)\n'
        '    return x or f"{x:d} gathers turned " f"purple" or "one" or "one graph on"\n'
    )
    found = sentences_of(source)
    assert found == {"{} gathers turned purple": 5, "one graph on": 5}
    assert [sentence for sentence in found if not matches(sentence, said)] == [
        "{} gathers turned purple"
    ]


def test_numbers_and_their_nouns_agree(said: list[str]) -> None:
    for text in said:
        assert not re.search(r"\b1 (nodes|others|launches|ranks|gathers)\b", text), text
        assert not re.search(r"\b(0|[2-9]|\d\d+) (node|launch|rank|gather)\b", text), text
        assert not re.search(r"\d{5,} bytes", text), text
    assert "launched 1 node earlier, behind enough compute" in said
    assert any(text.endswith("; in one call with another gather") for text in said)
    assert any(text.endswith("; in one call with 3 others") for text in said)


def test_reasons_of_memory_are_for_people(said: list[str]) -> None:
    held = {text.partition(": ")[2] for text in said if "held by memory" in text}
    assert held == {
        "held by memory: 20 B would be in flight of 19 B allowed (max_in_flight_bytes)",
        "held by memory: 3 GiB would be in flight of 2 GiB allowed (twice the largest region)",
        "held by memory: the peak would grow by more than 32 MiB (max_peak_growth)",
    }


@pytest.mark.parametrize(
    ("nbytes", "digits", "words"),
    [
        (0, 1, "0 B"),
        (1023, 1, "1023 B"),
        (1024, 1, "1 KiB"),
        (1536 << 20, 1, "1.5 GiB"),
        (100 << 20, 0, "100 MiB"),
        ((1 << 30) + (1 << 20), 1, "1 GiB"),
        ((1 << 30) + (1 << 20), 3, "1.001 GiB"),
        (5 << 50, 1, "5120 TiB"),
    ],
)
def test_sizes_in_words(nbytes: int, digits: int, words: str) -> None:
    assert bytes_in_words(nbytes, digits) == words


def test_sizes_that_differ_look_so() -> None:
    assert bytes_apart_in_words(3 << 30, 2 << 30) == ("3 GiB", "2 GiB")
    assert bytes_apart_in_words((1 << 30) + 1, 1 << 30) == ("1.000000001 GiB", "1 GiB")
    assert bytes_apart_in_words(7, 7) == ("7 B", "7 B")
