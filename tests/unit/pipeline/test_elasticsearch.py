from __future__ import annotations

import datetime
import json
import pickle
import ssl
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline import ConnectorError, OptionError
from penstock.pipeline.connectors.elasticsearch.actions import Action, Refused, actions, lines
from penstock.pipeline.connectors.elasticsearch.bulk import requests
from penstock.pipeline.connectors.elasticsearch.options import (
    ElasticsearchOptions,
    Limits,
    WriteMethod,
)
from penstock.pipeline.connectors.elasticsearch.sink import (
    BatchWriter,
    StreamWriter,
    Written,
    write,
)
from tests.unit.pipeline.fake_elasticsearch import FakeElasticsearch, running

SCHEMA = pa.schema([
    ("key", pa.binary()), ("value", pa.binary()), ("topic", pa.string()),
    ("partition", pa.int32()), ("offset", pa.int64()),
])  # fmt: skip
COLUMNS = SCHEMA.names
QUICK = {"retryBackoff": "1ms", "retryBackoffMax": "2ms"}


DEAD_LETTERS = {
    "onError": "deadLetter",
    "deadLetterTopic": "d",
    "penstock.bootstrap.servers": "localhost:9092",
}


def options(url: str = "http://localhost:9200", **more: str) -> ElasticsearchOptions:
    return ElasticsearchOptions.load({"url": url, **QUICK, **more}, COLUMNS)


def test_what_spark_adds_to_the_options_is_passed_over() -> None:
    assert options(queryName="orders", checkpointLocation="c") == options()


def rows(*values: bytes | None, key: bytes | None = None) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pylist(
        [
            {"key": key, "value": value, "topic": "Orders", "partition": 3, "offset": 10 + number}
            for number, value in enumerate(values)
        ],
        schema=SCHEMA,
    )


@pytest.fixture
def fake() -> Iterator[FakeElasticsearch]:
    with running() as made:
        yield made


# --- what is written ------------------------------------------------------------------------------


def test_records_become_documents_under_their_place(fake: FakeElasticsearch) -> None:
    done = write(options(fake.url), rows(b'{"a": 1}', b'{"b":\n "\xc3\xa4"}'))
    assert done == Written(2, 0, 0)
    assert fake.of("orders") == {"Orders+3+10": {"a": 1}, "Orders+3+11": {"b": "ä"}}
    assert fake.requests[0].path == "/_bulk"


def test_written_again_they_are_the_same_documents(fake: FakeElasticsearch) -> None:
    for _ in range(2):
        write(options(fake.url), rows(b'{"a":1}', b'{"a":2}'))
    assert fake.of("orders") == {"Orders+3+10": {"a": 1}, "Orders+3+11": {"a": 2}}


def test_by_key_a_replay_does_not_take_back_what_came_after(fake: FakeElasticsearch) -> None:
    by_key = options(fake.url, id="key", index="users")
    write(by_key, rows(b'{"n":1}', b'{"n":2}', b'{"n":3}', key=b"ada"))
    assert write(by_key, rows(b'{"n":1}', b'{"n":2}', key=b"ada")) == Written(0, 2, 0)
    assert fake.documents == {("users", "ada"): (12, {"n": 3})}


@pytest.mark.parametrize("kind", [BatchWriter, StreamWriter])
def test_how_many_rows_changed_nothing_is_said(
    fake: FakeElasticsearch,
    caplog: pytest.LogCaptureFixture,
    kind: type[BatchWriter | StreamWriter],
) -> None:
    writer = kind(options(fake.url, id="key", index="users"))
    batch = () if kind is BatchWriter else (7,)
    newest = [writer.write(rows(b'{"n":1}', b'{"n":2}', key=b"ada"))]
    writer.commit([*newest, None], *batch)
    assert caplog.records == []
    older = [writer.write(rows(b'{"n":0}', key=key)) for key in (b"ada", b"bob")]
    writer.commit([*older, *older], *batch)
    assert "2 of 4 rows changed nothing" in caplog.text
    assert fake.of("users") == {"ada": {"n": 2}, "bob": {"n": 0}}


def test_a_conflict_that_is_none_of_versions_is_tried_again(fake: FakeElasticsearch) -> None:
    times = iter([True, False])
    fake.item_error = lambda about, document: (409, "locked") if next(times) else None
    assert write(options(fake.url, id="key"), rows(b"{}", key=b"ada")) == Written(1, 0, 0)


def test_a_tombstone_deletes_and_stays_deleted_in_a_replay(fake: FakeElasticsearch) -> None:
    by_key = options(fake.url, id="key", index="users")
    for _ in range(2):
        write(by_key, rows(b'{"n":1}', None, key=b"ada"))
    assert fake.of("users") == {"ada": None}
    assert write(by_key, rows(None, key=b"never there")).written == 1


def test_tombstones_can_be_ignored_or_refused(fake: FakeElasticsearch) -> None:
    write(options(fake.url, id="key", tombstones="ignore"), rows(None, key=b"a"))
    assert fake.requests == []
    with pytest.raises(ConnectorError, match=r"record Orders-3@10.*no value; see option tombst"):
        write(options(fake.url), rows(None))


def test_upsert_merges(fake: FakeElasticsearch) -> None:
    merged = options(fake.url, id="key", index="users", writeMethod="upsert")
    write(merged, rows(b'{"a":1}', b'{"b":2}', key=b"ada"))
    assert fake.of("users") == {"ada": {"a": 1, "b": 2}}


def test_columns_become_a_document(fake: FakeElasticsearch) -> None:
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    row = {"name": "a", "at": at, "raw": b"\x00\xff", "sum": Decimal("1.50"), "tags": ["x", None]}
    batch = pa.RecordBatch.from_pylist([row])
    by_name = ElasticsearchOptions.load(
        {"url": fake.url, "index": "i", "id": "name"}, batch.schema.names
    )
    write(by_name, iter([batch]))
    assert fake.of("i")["a"] == {
        "name": "a", "at": "2026-01-02T03:04:05+00:00", "raw": "AP8=", "sum": "1.50",
        "tags": ["x", None],
    }  # fmt: skip


# --- requests -------------------------------------------------------------------------------------


def test_requests_are_bounded_and_share_a_connection(fake: FakeElasticsearch) -> None:
    bounded = options(fake.url, maxActionsPerRequest="3")
    write(bounded, rows(*[b"{}"] * 10))
    assert [len(request.operations) for request in fake.requests] == [3, 3, 3, 1]
    assert fake.connections == 1


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 5), st.integers(1, 60))
def test_requests_keep_all_in_order_within_both_limits(
    sizes: list[int], count: int, most: int
) -> None:
    limits = Limits(count, most, 1, 1, 1)
    encoded = [(Action({}, "i", str(n), None, b"{}"), b"x" * size) for n, size in enumerate(sizes)]
    found = list(requests(encoded, limits))
    assert [entry for chunk in found for entry in chunk] == encoded
    for chunk in found:
        assert 1 <= len(chunk) <= count
        assert len(chunk) == 1 or sum(len(data) for _, data in chunk) <= most


def test_gzip_both_ways(fake: FakeElasticsearch) -> None:
    write(options(fake.url, gzip="true"), rows(*[b'{"a": 1}'] * 100))
    assert len(fake.of("orders")) == 100
    assert fake.requests[0].size < 2000


@pytest.mark.parametrize(
    ("given_options", "header"),
    [
        ({"username": "ann", "password": "pä"}, "Basic YW5uOnDDpA=="),
        ({"apiKey": "abc=="}, "ApiKey abc=="),
    ],
)
def test_credentials(fake: FakeElasticsearch, given_options: dict[str, str], header: str) -> None:
    write(options(fake.url, **given_options), rows(b"{}"))
    assert fake.requests[0].headers["Authorization"] == header


def test_an_ingest_pipeline_and_a_path(fake: FakeElasticsearch) -> None:
    write(options(fake.url + "/es/", ingestPipeline="geo ip"), rows(b"{}"))
    assert fake.requests[0].path == "/es/_bulk"
    assert fake.requests[0].query["pipeline"] == ["geo ip"]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [429, 500, 503, "die early", "die"])
def test_what_passes_is_tried_again(fake: FakeElasticsearch, answer: int | str) -> None:
    fake.answers.extend([answer, answer])
    write(options(fake.url, id="key"), rows(b'{"n":1}', b'{"n":2}', key=b"ada"))
    assert fake.documents == {("orders", "ada"): (11, {"n": 2})}
    assert len(fake.requests) == 3


def test_single_items_are_tried_again_alone(fake: FakeElasticsearch) -> None:
    times = iter([True, True, False])

    def busy(about: dict[str, Any], document: Any) -> tuple[int, str] | None:
        return (429, "queue is full") if about["_id"].endswith("11") and next(times) else None

    fake.item_error = busy
    assert write(options(fake.url), rows(b"{}", b"{}", b"{}")) == Written(3, 0, 0)
    assert [len(request.operations) for request in fake.requests] == [3, 1, 1]


def test_an_earlier_write_does_not_come_after_a_later_one(fake: FakeElasticsearch) -> None:
    # Without versions, to try the first again would leave the older document.
    times = iter([True, False, False])
    fake.item_error = lambda about, document: (429, "full") if next(times) else None
    plain = options(fake.url, id="key", version="none")
    assert write(plain, rows(b'{"n":1}', b'{"n":2}', key=b"ada")) == Written(1, 1, 0)
    assert fake.of("orders") == {"ada": {"n": 2}}


def test_a_dead_node_is_left_for_the_next(fake: FakeElasticsearch) -> None:
    with running() as gone:
        pass
    assert write(options(f"{gone.url},{fake.url}"), rows(b"{}")).written == 1


def test_retries_end(fake: FakeElasticsearch) -> None:
    with running() as gone:
        pass
    with pytest.raises(ConnectorError, match=r"nothing went through for 0\.03 s.*refused.*next:"):
        write(options(gone.url, retryTimeout="30ms"), rows(b"{}"))


def test_a_refused_document_is_reported_with_its_place(fake: FakeElasticsearch) -> None:
    fake.item_error = lambda about, document: (400, "no date") if "bad" in document else None
    with pytest.raises(
        ConnectorError,
        match=r"record Orders-3@11 \(document 'Orders\+3\+11' of index orders\): as_told: no date",
    ):
        write(options(fake.url), rows(b"{}", b'{"bad":1}', b"{}"))
    assert len(fake.of("orders")) == 2  # The others of the request are through.


@pytest.mark.parametrize(
    "value", [b"{", b"[1]", b"\xff", b'{"a": NaN}', b"7", "{}".encode("utf-16")]
)
def test_what_is_no_json_object_spoils_nothing(fake: FakeElasticsearch, value: bytes) -> None:
    done = write(options(fake.url, onError="skip"), rows(b"{}", value, b"{}"))
    assert done == Written(2, 0, 1)
    assert list(fake.of("orders")) == ["Orders+3+10", "Orders+3+12"]


def test_too_large_requests_are_halved(fake: FakeElasticsearch) -> None:
    fake.answers.extend([413, 413, 200, 413])
    done = write(options(fake.url, onError="skip"), rows(b"{}", b"{}", b"{}", b"{}"))
    # Four are too many, and so are two, then one is taken, and the next is too large by itself.
    assert done == Written(3, 0, 1)
    assert [len(request.operations) for request in fake.requests] == [4, 2, 1, 1, 2]


@pytest.mark.parametrize(
    ("status", "match"), [(401, "access is refused"), (404, "no bulk interface answers")]
)
def test_some_answers_are_final(fake: FakeElasticsearch, status: int, match: str) -> None:
    fake.answers.append(status)
    with pytest.raises(ConnectorError, match=match):
        write(options(fake.url), rows(b"{}"))
    assert len(fake.requests) == 1


def test_tls(tmp_path: Path) -> None:
    ca, certificate, key = _certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with running(context) as fake:
        assert write(options(fake.url, caFile=str(ca)), rows(b"{}")).written == 1
        assert write(options(fake.url, verifyCertificates="false"), rows(b"{}")).written == 1
        with pytest.raises(ConnectorError, match=r"is not trusted.*next: .*caFile"):
            write(options(fake.url), rows(b"{}"))
        with pytest.raises(ConnectorError, match="caFile, certificateFile or keyFile"):
            write(options(fake.url, caFile=str(tmp_path / "none")), rows(b"{}"))


def _certificate(directory: Path) -> tuple[Path, Path, Path]:
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fake")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, secret = directory / "c.pem", directory / "k.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, certificate, secret


# --- options --------------------------------------------------------------------------------------


def test_options_pickle_and_show_no_secret() -> None:
    found = options(username="ann", password="hidden")
    assert pickle.loads(pickle.dumps(found)) == found
    assert "hidden" not in repr(found)


@pytest.mark.parametrize(
    ("given_options", "match"),
    [
        ({"url": "localhost:9200"}, r"http://host:port"),
        ({"url": "http://a:1,,http://b:1"}, r"http://host:port"),
        ({"url": "https://a:1,http://b:1"}, "http:// and https://, so that credentials"),
        ({"url": "http://ann:secret@a:1"}, "give credentials as username"),
        ({"username": "ann"}, "username and password go together"),
        ({"username": "a", "password": "b", "apiKey": "c"}, "contradict each other"),
        ({"certificateFile": "c.pem"}, "go together"),
        ({"caFile": "c.pem", "verifyCertificates": "false"}, "of no use"),
        ({"index": "Orders"}, "in lower case"),
        ({"id": "nokey"}, "no such column; the rows have key, value"),
        ({"tombstones": "delete"}, "say it with id=key"),
        ({"writeMethod": "upsert", "id": "key", "version": "offset"}, "takes no versions"),
        ({"writeMethod": "upsert", "id": "key", "ingestPipeline": "p"}, "ingest pipelines work"),
        ({"version": "vers"}, "no such column"),
        ({"document": "columns", "tombstones": "fail"}, "tombstones is about column value"),
        ({"onError": "deadLetter"}, "option deadLetterTopic is missing"),
        ({"onError": "deadLetter", "deadLetterTopic": "d"}, "penstock.bootstrap.servers is miss"),
        ({**DEAD_LETTERS, "penstock.transactional.id": "t"}, "have no transactions"),
        ({**DEAD_LETTERS, "penstock.acks": "0"}, "nothing would be acknowledged"),
        ({**DEAD_LETTERS, "penstock.value.serializer": "json"}, "are bytes already"),
        ({"requestTimeout": "0"}, "requestTimeout='0': at least 1ms is wanted"),
        ({"deadLetterTopic": "d"}, "of use with onError=deadLetter alone"),
        ({"maxActionsPerRequest": "0"}, "a whole number from 1"),
        ({"indx": "a"}, "unknown option indx; did you mean index"),
    ],
)
def test_what_is_wrong_is_refused(given_options: dict[str, str], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        ElasticsearchOptions.load({"url": "http://localhost:9200", **given_options}, COLUMNS)


def test_rows_without_a_place_want_an_id_and_an_index() -> None:
    with pytest.raises(OptionError, match="the rows have no column topic; name the column"):
        ElasticsearchOptions.load({"url": "http://a:1", "index": "i"}, ["name"])
    with pytest.raises(OptionError, match="option index is missing"):
        ElasticsearchOptions.load({"url": "http://a:1", "id": "name"}, ["name"])


# --- lines ----------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.text(), st.none() | st.integers() | st.text(), max_size=5),
    st.sampled_from(WriteMethod),
    st.sampled_from([None, 1, 4]),
)
def test_an_action_is_as_many_lines_as_it_should_be(
    document: dict[str, Any], method: WriteMethod, indent: int | None
) -> None:
    value = json.dumps(document, indent=indent)
    row = {"key": None, "value": value, "topic": "t", "partition": 0, "offset": 1}
    (action,) = actions([row], options())
    assert isinstance(action, Action)
    data = lines(action, method)
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 2
    body = json.loads(data.split(b"\n")[1])
    assert (body["doc"] if method is WriteMethod.UPSERT else body) == document


@pytest.mark.parametrize("version", [None, -1, "7", 1.0])
def test_a_version_is_a_whole_number(version: Any) -> None:
    row = {"key": b"k", "value": "{}", "topic": "t", "partition": 0, "offset": version}
    (refused,) = actions([row], options(id="key"))
    assert isinstance(refused, Refused)
    assert "a version is a whole number" in refused.reason


@pytest.mark.parametrize("key", [None, b"", b"\xff"])
def test_an_id_is_text(key: bytes | None) -> None:
    row = {"key": key, "value": "{}", "topic": "t", "partition": 0, "offset": 1}
    (refused,) = actions([row], options(id="key"))
    assert isinstance(refused, Refused)
