"""Options that take seconds refuse what no clock can wait for."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from overlap_core.cli import main


@pytest.mark.parametrize("command", ["demo", "doctor"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "1e300", "2592001", "0", "soon"])
def test_a_timeout_is_a_length_of_time(command: str, seconds: str) -> None:
    result = CliRunner().invoke(main, [command, "--timeout", seconds], catch_exceptions=False)
    assert result.exit_code == 2
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("Error: Invalid value for '--timeout': ")
    assert result.stderr.splitlines()[-1] == errors[0]


def test_the_longest_timeout_is_taken() -> None:
    arguments = ["doctor", "--timeout", "2592000", "no-such-report.json"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert "Error: no-such-report.json: cannot be read" in result.stderr
