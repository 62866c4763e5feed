from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.config import AdminConfig, AttemptConfig, ConsumerConfig
from penstock.pipeline.errors import OptionError, PipelineError
from penstock.pipeline.option_map import OptionMap
from penstock.pipeline.source_options import SourceOptions


def options(**given: Any) -> OptionMap:
    return OptionMap(given, where="the penstock source")


def of_clients(**given: str) -> OptionMap:
    named = {"penstock." + name: value for name, value in given.items()}
    return OptionMap({"penstock.bootstrap.servers": "a:1,b:2", **named}, where="the penstock sink")


def test_names_count_in_any_case() -> None:
    found = options(STARTINGoffsets="earliest")
    assert found.text("startingOffsets") == "earliest"
    found.finish()


def test_the_same_name_twice_is_refused_unless_it_says_the_same() -> None:
    options(a="1", A="1").text("a")
    with pytest.raises(OptionError, match=r"the penstock source: a and A are the same"):
        options(a="1", A="2")


def test_what_has_no_value_is_not_given() -> None:
    found = options(topic=None)
    assert not found.has("topic")
    assert found.text("topic", "t") == "t"


def test_what_nobody_asked_for_is_refused_with_the_near_name() -> None:
    found = options(maxOffsetPerTrigger="5")
    found.whole_number("maxOffsetsPerTrigger")
    found.text("topic")
    with pytest.raises(
        OptionError, match=r"unknown option maxOffsetPerTrigger; did you mean maxOffsetsPerTrigger"
    ):
        found.finish()


def test_where_no_name_is_near_all_are_listed() -> None:
    found = options(colour="red")
    found.text("topic")
    found.flag("failOnDataLoss", True)
    with pytest.raises(OptionError, match=r"option colour; the options are failOnDataLoss, topic"):
        found.finish()


def test_what_spark_adds_for_a_sink_is_known_and_for_a_source_is_not() -> None:
    # As `writer.queryName(...)` and `.option("checkpointLocation", ...)` give them.
    given = {"queryname": "q", "checkpointlocation": "c", "topic": "t"}
    sink = OptionMap.of_sink(given, where="the sink")
    assert sink.text("topic") == "t"
    sink.finish()
    for name in ("queryName", "checkpointLocation"):
        source = OptionMap({name: "x"}, where="the source")
        with pytest.raises(OptionError, match=f"the source: unknown option {name}"):
            source.finish()


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_text_is_no_value(text: str) -> None:
    with pytest.raises(OptionError, match=r"topic=.*text is wanted"):
        options(topic=text).text("topic")


def test_what_is_required_says_what_to_write() -> None:
    with pytest.raises(OptionError, match="option topic is missing; name one"):
        options().required("topic", "name one")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("FALSE", False), (" True ", True)])
def test_flags(text: str, value: bool) -> None:
    assert options(flag=text).flag("flag", not value) is value


@pytest.mark.parametrize("text", ["yes", "1", "truee"])
def test_what_is_no_flag(text: str) -> None:
    with pytest.raises(OptionError, match=f"flag='{text}': true or false is wanted"):
        options(flag=text).flag("flag", True)


@given(st.integers(-(2**62), 2**62))
def test_whole_numbers_come_back(number: int) -> None:
    assert options(n=str(number)).whole_number("n", low=-(2**63)) == number


@pytest.mark.parametrize("text", ["0", "1.5", "1e3", "ten", "101", "٣", "1_0", "9" * 30])
def test_what_is_no_whole_number_within_the_bounds(text: str) -> None:
    with pytest.raises(OptionError, match=r"n=.*: a whole number from 1 to 100 is wanted"):
        options(n=text).whole_number("n", low=1, high=100)


@given(st.text())
def test_any_text_is_a_number_or_refused(text: str) -> None:
    try:
        found = options(n=text).whole_number("n", low=-5, high=5)
    except OptionError:
        return
    assert found is not None
    assert -5 <= found <= 5


@pytest.mark.parametrize(
    ("text", "ms"),
    [("0", 0), ("250", 250), ("250ms", 250), ("30s", 30_000), ("15 m", 900_000), ("1H", 3_600_000)],
)
def test_spans_of_time(text: str, ms: int) -> None:
    assert options(delay=text).span_ms("delay") == ms


@pytest.mark.parametrize("text", ["soon", "-1s", "1.5s", "5 weeks", "s"])
def test_what_is_no_span_of_time(text: str) -> None:
    with pytest.raises(OptionError, match=r"delay=.*30s"):
        options(delay=text).span_ms("delay")


def test_a_span_that_is_too_short() -> None:
    assert options(delay="2s").span_ms("delay", low=2_000) == 2_000
    with pytest.raises(OptionError, match="delay='1s': at least 2000ms is wanted"):
        options(delay="1s").span_ms("delay", low=2_000)


def test_choices() -> None:
    allowed = ("read_committed", "read_uncommitted")
    assert options(level="READ_COMMITTED").choice("level", allowed, "x") == "read_committed"
    assert options().choice("level", allowed, "read_uncommitted") == "read_uncommitted"
    with pytest.raises(OptionError, match="one of read_committed, read_uncommitted is wanted"):
        options(level="serializable").choice("level", allowed, "x")


def test_exactly_one_of_several() -> None:
    names = ("subscribe", "subscribePattern", "assign")
    assert options(subscribepattern="a.*").just_one(*names) == "subscribePattern"
    with pytest.raises(OptionError, match=r"subscribe, subscribePattern or assign .* none is"):
        options().just_one(*names)
    with pytest.raises(OptionError, match="subscribe and assign contradict each other"):
        options(subscribe="a", assign="{}").just_one(*names)


# --- clients --------------------------------------------------------------------------------


def test_clients_settings_go_by_their_own_names_and_types() -> None:
    found = of_clients(**{
        "fetch.min.bytes": "10", "CLIENT_id": "me", "enable.auto.commit": "false",
        "default.api.timeout.ms": "9",
    })  # fmt: skip
    settings = found.client_settings(ConsumerConfig, AdminConfig)
    found.finish()
    assert settings.bootstrap_servers == "a:1,b:2"
    assert settings.of(AdminConfig) == {"client_id": "me", "default_api_timeout_ms": 9}
    assert settings.of(ConsumerConfig) == {
        "fetch_min_bytes": 10, "client_id": "me", "enable_auto_commit": False,
        "default_api_timeout_ms": 9,
    }  # fmt: skip
    ConsumerConfig.load(settings.bootstrap_servers, settings.of(ConsumerConfig))
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_clients_need_to_know_where_to_begin() -> None:
    with pytest.raises(OptionError, match=r"option penstock\.bootstrap\.servers is missing"):
        options().client_settings(ConsumerConfig)


def test_a_setting_that_the_client_does_not_have_is_refused() -> None:
    found = of_clients(**{"linger.m": "5"})
    found.client_settings(AttemptConfig)
    with pytest.raises(OptionError, match=r"penstock\.linger\.m; did you mean penstock\.linger\.m"):
        found.finish()


@pytest.mark.parametrize("name", ["acks", "linger.ms"])
def test_a_setting_of_another_kind_of_client_is_refused(name: str) -> None:
    found = of_clients(**{name: "1"})
    found.client_settings(ConsumerConfig)
    with pytest.raises(OptionError, match=f"unknown option penstock.{name}"):
        found.finish()


def test_callables_cannot_be_written_and_names_can() -> None:
    found = of_clients(partitioner="round_robin").client_settings(AttemptConfig)
    assert found.of(AttemptConfig) == {"partitioner": "round_robin"}
    with pytest.raises(OptionError, match=r"penstock.*partitioner='mine'"):
        of_clients(partitioner="mine").client_settings(AttemptConfig)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("linger.ms", "soon", r"penstock\.linger\.ms='soon': a whole number from 0 to"),
        ("compression", "rar", r"options penstock\.\*: .*compression='rar'"),
        ("max.batch.size", "9", None),
        ("tls.ca", "/no/such/file", r"options penstock\.\*: .*no/such/file"),
    ],
)
def test_values_are_checked_as_the_client_checks_them(
    name: str, value: str, match: str | None
) -> None:
    if match is None:
        of_clients(**{name: value}).client_settings(AttemptConfig)
        return
    with pytest.raises(OptionError, match=match):
        of_clients(**{name: value}).client_settings(AttemptConfig)


def test_a_wrong_address_is_refused_before_anything_is_opened() -> None:
    found = options(**{"penstock.bootstrap.servers": "host"})
    with pytest.raises(OptionError, match=r"options penstock\.\*: penstock\.bootstrap\.servers: "):
        found.client_settings(ConsumerConfig)


def test_what_the_sink_sets_itself_is_refused_with_what_to_do_instead() -> None:
    found = of_clients(**{"transactional.id": "mine"})
    with pytest.raises(OptionError, match=r"penstock\.transactional\.id='mine': use sinkId"):
        found.client_settings(AttemptConfig, ours={"transactional_id": "use sinkId"})


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("kafka.group.id", r"unknown option kafka\.group\.id: write groupIdPrefix instead"),
        ("kafka.fetch.min.bytes", r"kafka\.fetch\.min\.bytes; did you mean penstock\.fetch\.min"),
        ("kafka.no.such.thing", r"unknown option kafka\.no\.such\.thing; "),
    ],
)
def test_an_option_of_kafkas_is_answered_with_ours(name: str, match: str) -> None:
    given = {"penstock.bootstrap.servers": "a:1", "subscribe": "t", name: "1"}
    with pytest.raises(OptionError, match=match) as caught:
        SourceOptions.load(given)
    assert "penstock.group.id" not in str(caught.value)


def test_a_producers_setting_is_called_so() -> None:
    with pytest.raises(OptionError, match=r"producer setting penstock\.compression='rar'"):
        of_clients(compression="rar").client_settings(AttemptConfig)


def test_one_setting_in_two_spellings_is_refused() -> None:
    found = of_clients(**{"linger.ms": "1", "linger_ms": "2"})
    with pytest.raises(OptionError, match=r"penstock\.linger\.ms is given twice"):
        found.client_settings(AttemptConfig)


def test_an_option_error_is_a_value_error_and_pickles() -> None:
    error = OptionError("no such option")
    assert isinstance(error, ValueError)
    assert isinstance(error, PipelineError)
    assert str(pickle.loads(pickle.dumps(error))) == "no such option"
