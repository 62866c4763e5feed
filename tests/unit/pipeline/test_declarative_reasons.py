from __future__ import annotations

import pytest

from penstock.pipeline.declarative.definitions import _reasons, failed
from penstock.pipeline.reasons import as_written, is_hopeless

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


def test_what_is_to_be_done_is_said_once_and_all_of_it_is_kept() -> None:
    error = failed(RuntimeError("a\nb.OptionError: no; next: mend it\n  at y"), "the run failed")
    assert str(error) == "the run failed: OptionError: no; next: mend it"
    assert error.detail == "a\nb.OptionError: no; next: mend it\n  at y"
    assert failed(RuntimeError("in a line"), "the run failed").detail == ""


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("Flow shout is RUNNING.", "Flow Shout is RUNNING."),
        ("Flow 'shout' has FAILED.", "Flow 'Shout' has FAILED."),
        ("Failed to resolve flow: 'shout'.", "Failed to resolve flow: 'Shout'."),
        # The view is Lines, and a query that reads lines does not find it.
        ("The view `lines` cannot be found", "The view `lines` cannot be found"),
        ("who may shout", "who may shout"),
        ("Flow same is RUNNING.", "Flow same is RUNNING."),
        ("Flow shouts is RUNNING.", "Flow shouts is RUNNING."),
    ],
)
def test_names_are_told_as_they_are_written(text: str, written: str) -> None:
    assert as_written(text, ["Shout", "Lines", "Same", "sAME"]) == written


@pytest.mark.parametrize(
    ("reason", "hopeless"),
    [
        ("Flow 'x' has FAILED. OptionError: unknown option", True),
        ("BootstrapError: no bootstrap address could be used", False),
        ("WriteFailedError: the leader is away", False),
        ("[TASK_FAILED] it broke", False),
        ("a note about OptionError in passing", False),
    ],
)
def test_what_can_be_cured_by_trying_again_is_told_apart(reason: str, hopeless: bool) -> None:
    assert is_hopeless(reason) is hopeless
