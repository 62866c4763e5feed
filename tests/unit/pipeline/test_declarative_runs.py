"""How a run's failures are told, and when a run ends by them, with Spark's side played."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.pipeline.declarative.definitions import DefinitionError, Pipeline, run
from penstock.pipeline.declarative.graph import Dataset

WRONG = (
    "Flow 'shout' has FAILED.\nError: [STREAM_FAILED] Query terminated: Traceback:\n"
    '  File "datasource.py", line 59\n'
    "penstock.pipeline.errors.OptionError: unknown option topik; next: mend it\n"
)
AWAY = WRONG.replace("OptionError: unknown option topik", "NetworkError: the broker went away")
OUT = WRONG.replace("OptionError: unknown option topik", "BootstrapError: no address could be used")


class Spark:
    """A server that tells these messages, and of a run that was dropped nothing more."""

    def __init__(self, *messages: str) -> None:
        self.messages = messages
        self.client = self
        self.dropped: list[str] = []
        self.is_heard_out = False

    def execute_command_as_iterator(self, _command: Any) -> Iterator[dict[str, Any]]:
        for message in self.messages:
            if self.dropped:
                break
            event = SimpleNamespace(message=message, timestamp=Timestamp(seconds=1))
            yield {"pipeline_event_result": SimpleNamespace(event=event)}
        self.is_heard_out = True
        raise RuntimeError("the run FAILED; see above")

    def execute_command(self, command: Any) -> None:
        self.dropped.append(command.pipeline_command.drop_dataflow_graph.dataflow_graph_id)


def failure(spark: Spark) -> tuple[list[str], DefinitionError]:
    """What was told in brief, and how it failed."""
    pipeline = Pipeline(cast("Any", SimpleNamespace(storage="file:///x")), "some-graph")
    pipeline.graph.datasets["Shout"] = Dataset("Shout", "sink")
    told: list[str] = []
    with pytest.raises(DefinitionError) as caught:
        told.extend(event.brief for event in run(cast("Any", spark), pipeline))
    return told, caught.value


def test_what_cannot_be_cured_ends_the_run_at_the_first_try() -> None:
    spark = Spark("Flow shout is RUNNING.", "Flow shout has COMPLETED.", WRONG, "Flow shout is X.")
    told, error = failure(spark)
    assert told == [
        "Flow Shout is RUNNING.",
        "Flow Shout has COMPLETED.",
        "Flow 'Shout' has FAILED. OptionError: unknown option topik; next: mend it",
    ]
    assert spark.dropped == ["some-graph"]
    assert spark.is_heard_out
    assert str(error) == (
        "the run failed: Flow 'Shout' has FAILED. OptionError: unknown option topik; next: mend it"
    )
    assert error.detail == WRONG.replace("shout", "Shout")


def test_what_may_pass_is_tried_again_by_spark() -> None:
    spark = Spark("Flow shout is RUNNING.", AWAY, "Flow shout is RUNNING.", AWAY)
    told, error = failure(spark)
    assert len(told) == 4
    assert spark.dropped == []
    assert "NetworkError: the broker went away" in str(error)


def test_the_other_flows_may_end_before_the_run_does() -> None:
    spark = Spark(
        "Flow other is RUNNING.", "Flow shout is RUNNING.", WRONG, "Flow shout is STARTING.",
        "Flow other has COMPLETED.", "Flow shout is RUNNING.",
    )  # fmt: skip
    told, _ = failure(spark)
    assert told[-1] == "Flow other has COMPLETED."
    assert spark.dropped == ["some-graph"]


def test_an_outage_may_pass_by_the_second_attempt_and_a_wrong_address_does_not() -> None:
    spark = Spark("Flow shout is RUNNING.", OUT, "Flow shout is RUNNING.", "Flow shout is X.")
    assert len(failure(spark)[0]) == 4
    assert spark.dropped == []
    spark = Spark("Flow shout is RUNNING.", OUT, "Flow shout is RUNNING.", OUT, "Flow shout is X.")
    assert len(failure(spark)[0]) == 4
    assert spark.dropped == ["some-graph"]


def test_each_flow_has_its_own_second_attempt() -> None:
    other = OUT.replace("shout", "other")
    spark = Spark("Flow shout is RUNNING.", OUT, "Flow other is RUNNING.", other, "Flow x is Y.")
    assert len(failure(spark)[0]) == 5
    assert spark.dropped == []


@pytest.mark.parametrize("state", ["QUEUED", "PLANNING", "STARTING", "RUNNING"])
def test_a_flow_is_under_way_from_its_first_state_on(state: str) -> None:
    spark = Spark(
        f"Flow other is {state}.", "Flow shout is RUNNING.", WRONG, "Flow other has COMPLETED."
    )
    assert len(failure(spark)[0]) == 4
    assert spark.dropped == ["some-graph"]
