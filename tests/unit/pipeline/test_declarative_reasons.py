from __future__ import annotations

import pytest

from penstock.pipeline.declarative.definitions import _reasons, failed

IN_PYTHON = """\
Flow 'shout' has FAILED.
Error: [STREAM_FAILED] Query [id = 8] terminated with exception: Traceback (most recent call last):
  File "datasource.py", line 59, in streamWriter
    raise OptionError("no such")
penstock.pipeline.errors.OptionError: unknown option x
 SQLSTATE: 38000
=== Streaming Query ===
other.OptionError: of another attempt
"""


@pytest.mark.parametrize(
    ("message", "reasons"),
    [
        ("Flow upper has COMPLETED.", []),
        ("", []),
        ("Failed to resolve flow due to upstream failure: 'a'.\nError: b", []),
        (
            "Failed to resolve flow: 'a'.\nError: [X] b.\nHint",
            ["Failed to resolve flow: 'a'. Error: [X] b."],
        ),
        (
            IN_PYTHON,
            ["Flow 'shout' has FAILED. OptionError: unknown option x"],
        ),
    ],
)
def test_the_reason_of_a_failure_is_taken_from_what_spark_tells(
    message: str, reasons: list[str]
) -> None:
    assert _reasons(message) == reasons


def test_no_stack_of_javas_is_in_a_message() -> None:
    error = RuntimeError("it broke\n\nJVM stacktrace:\norg.apache.X\n  at y")
    assert str(failed(error, "the run failed")).startswith("the run failed: it broke; next: ")
