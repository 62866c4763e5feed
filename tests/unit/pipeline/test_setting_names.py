from __future__ import annotations

import pytest

from penstock.client import RecordTooLargeError, TransactionAbortableError
from penstock.pipeline.errors import ReadTimeoutError
from penstock.pipeline.setting_names import as_options, settings_as_options


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (
            "max_request_size=5; raise max_request_size (and max.message.bytes).",
            "penstock.max.request.size=5; raise penstock.max.request.size (and max.message.bytes).",
        ),
        ("raise buffer_memory.", "raise penstock.buffer.memory."),
        ("set tls_ca, tls_key", "set penstock.tls.ca, penstock.tls.key"),
        ("acks=1 and 3 retries", "penstock.acks=1 and 3 retries"),
    ],
)
def test_settings_are_named_as_options_are(said: str, wanted: str) -> None:
    assert as_options(said) == wanted
    assert as_options(wanted) == wanted


@pytest.mark.parametrize(
    "said",
    ["topic 'client_id'", "/etc/tls_ca/x", "tls_ca.pem", "my_linger_ms", "linger_ms_2", "packs=1"],
)
def test_what_is_no_setting_stays(said: str) -> None:
    assert as_options(said) == said


def test_some_have_another_prefix_or_name() -> None:
    said = "transactional_id contradicts acks=0"
    found = as_options(said, prefix="other.", other={"transactional_id": "delivery"})
    assert found == "delivery contradicts other.acks=0"


def test_errors_keep_their_class_and_cause() -> None:
    cause = RecordTooLargeError("raise max_request_size")
    with pytest.raises(TransactionAbortableError) as caught, settings_as_options():
        raise TransactionAbortableError("because of max_request_size") from cause
    assert caught.value.message == "because of penstock.max.request.size"
    assert caught.value.__cause__ is cause
    assert cause.message == "raise penstock.max.request.size"


def test_errors_of_pipelines_too_and_no_others() -> None:
    with (
        pytest.raises(ReadTimeoutError, match=r"^penstock\.fetch\.max\.bytes$"),
        settings_as_options(),
    ):
        raise ReadTimeoutError("fetch_max_bytes")
    with pytest.raises(ValueError, match=r"^fetch_max_bytes$"), settings_as_options():
        raise ValueError("fetch_max_bytes")
