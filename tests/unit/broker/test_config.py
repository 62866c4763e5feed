"""A node's settings: sources, precedence, and every refusal's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.broker.config import NodeConfig, describe_keys
from penstock.raft_meta.exposure import TlsFiles
from penstock.wire.errors import ConfigurationError

MINIMAL = """
node.id = 1
data.dir = "/data"
controller.quorum.voters = ["1@127.0.0.1:10092"]
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "node.toml"
    file.write_text(text)
    return file


def test_a_minimal_file_is_enough(tmp_path: Path) -> None:
    config = NodeConfig.load(write(tmp_path, MINIMAL))
    assert config.voters == {1: ("127.0.0.1", 10092)}
    assert config.roles == {"controller", "broker"}
    assert config.log_directories == [Path("/data/logs")]
    assert config.metadata_directory == Path("/data/raft")
    assert config.advertised == ("127.0.0.1", 9092)
    assert config.flush_policy == "commit"


def test_clients_from_outside_are_told_what_was_set_for_them_or_where_they_are_served(
    tmp_path: Path,
) -> None:
    assert NodeConfig.load(write(tmp_path, MINIMAL)).external is None
    listen = MINIMAL + "external.listen = '127.0.0.2:9094'\n"
    assert NodeConfig.load(write(tmp_path, listen)).external == ("127.0.0.2", 9094)
    both = listen + "external.advertised = 'b1.example.com:9092'\n"
    config = NodeConfig.load(write(tmp_path, both))
    assert config.external == ("b1.example.com", 9092)
    assert config.advertised == ("127.0.0.1", 9092)
    everywhere = both.replace("127.0.0.2:9094", "0.0.0.0:9094")
    assert NodeConfig.load(write(tmp_path, everywhere)).external == ("b1.example.com", 9092)


def test_tables_are_the_same_as_dotted_keys(tmp_path: Path) -> None:
    text = MINIMAL + "[broker]\nlisten = '127.0.0.1:1'\nsession.timeout.ms = 7000\n"
    config = NodeConfig.load(write(tmp_path, text))
    assert config.broker_listen == "127.0.0.1:1"
    assert config.broker_session_timeout_ms == 7000


def test_environment_wins_over_the_file_and_flags_over_both(tmp_path: Path) -> None:
    file = write(tmp_path, MINIMAL + "flush.interval.ms = 20\n")
    environment = {"PENSTOCK_FLUSH_INTERVAL_MS": "30", "PENSTOCK_NODE_RACK": "a"}
    assert NodeConfig.load(file, environment).flush_interval_ms == 30
    config = NodeConfig.load(file, environment, ["flush.interval.ms=40"])
    assert (config.flush_interval_ms, config.node_rack) == (40, "a")


def test_foreign_environment_variables_are_left_alone(tmp_path: Path) -> None:
    environment = {"PENSTOCK_SERVICE_HOST": "10.0.0.1", "PENSTOCK_BOOTSTRAP": "x:1"}
    assert NodeConfig.load(write(tmp_path, MINIMAL), environment).node_id == 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("flush.polcy = 'os'", r"node\.toml: unknown setting 'flush.polcy'; did you mean 'flush."),
        ("flush.policy = 'never'", "flush.policy='never': one of commit, interval, os is wanted"),
        ("flush.interval.ms = 'soon'", "flush.interval.ms='soon': a whole number is wanted"),
        ("flush.interval.ms = 1", "flush.interval.ms=1: a whole number of at least 10 is wanted"),
        ("broker.listen = 'nowhere'", "broker.listen: 'nowhere' is not an address; write host:p"),
        ("broker.listen = '0.0.0.0:9092'", "0.0.0.0:9092, which nobody can connect to"),
        ("external.listen = 'outside'", "external.listen: 'outside' is not an address"),
        (
            "external.listen = '[::]:9094'",
            r"external.advertised would be \[::\]:9094, which nobody can connect to; set ext",
        ),
        (
            "external.listen = '127.0.0.1:9094'\nexternal.advertised = 'b.example:0'",
            "external.advertised would be b.example:0, which nobody can connect to",
        ),
        (
            f"external.listen = '127.0.0.1:9094'\nexternal.advertised = '{'b' * 256}:9094'",
            "external.advertised has a host of 256 characters; at most 255",
        ),
        (
            "external.advertised = 'b.example:9094'",
            "external.advertised is for external.listen, which is not set",
        ),
        (
            "external.listen = '127.0.0.2:9092'",
            "external.listen and broker.listen have the same port, 9092; give",
        ),
        ("node.roles = 'leader'", "node.roles='leader': controller, broker, or controller,broker"),
        (
            "broker.heartbeat.interval.ms = 5000",
            "broker.heartbeat.interval.ms must be at most half of broker.session.timeout.ms",
        ),
        (
            "controller.election.timeout.max.ms = 400",
            "controller.election.timeout.min.ms must be below",
        ),
        ("group.min.session.timeout.ms = 2000000", "must not be above group.max.session"),
        ("controller.raft.heartbeat.ms = 400", "controller.raft.heartbeat.ms must be at most half"),
        ("flush = 3\nflush.policy = 'os'", "is not valid TOML"),
        (
            "tls.ca = '/ca'",
            "tls.certificate and tls.key are not set; TLS needs all of tls.ca, tls.",
        ),
        ("tls.key = '/key'", "tls.ca and tls.certificate are not set"),
        ("tls.client.auth = 'maybe'", "one of required, none is wanted"),
        ("replication.listen = '127.0.0.1:1'", "is for tls.client.auth=none alone"),
        ("replication.frames.listen = 'nowhere'", "'nowhere' is not an address"),
        (
            "replication.transport = 'grpc'\nreplication.frames.listen = '127.0.0.1:1'",
            "replication.frames.listen is for replication.transport=frames",
        ),
        ("controller.insecure.allow = 'perhaps'", "'perhaps': true or false is wanted"),
        ("controller.listen = '0.0.0.0:1'", "can be reached from other machines, and without TLS"),
        ("controller.listen = 'node-1.example:1'", "set controller.insecure.allow = true"),
        ("controller.listen = '[::]:1'", r"controller.listen=\[::\]:1 can be reached"),
    ],
)
def test_refusals_name_the_key_and_what_is_allowed(
    tmp_path: Path, extra: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        NodeConfig.load(write(tmp_path, MINIMAL + extra + "\n"))


def test_a_variable_that_empties_what_the_file_says_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + TLS)
    with pytest.raises(
        ConfigurationError,
        match=r"tls.ca is not set \(PENSTOCK_TLS_CA in the environment is empty, and goes before "
        r"the node file\); TLS needs",
    ):
        NodeConfig.load(path, {"PENSTOCK_TLS_CA": ""})
    with pytest.raises(ConfigurationError, match=r"\(tls.key is empty on the command line, and"):
        NodeConfig.load(path, overrides=["tls.key="])


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(b"node.id = 1 # \xff\n")
    with pytest.raises(ConfigurationError, match=r"node\.toml is not valid TOML: 'utf-8' codec"):
        NodeConfig.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data.dir = '/data'", "node.id is not set"),
        ("node.id = 1", "data.dir is not set"),
        ("node.id = 1\ndata.dir = '/d'", "controller.quorum.voters is not set"),
        (
            (
                "node.id = 2\ndata.dir = '/d'\ncontroller.quorum.voters = '1@h:1'\n"
                "controller.listen = '0.0.0.0:10092'"
            ),
            "node 2 has the controller role and is not among controller.quorum.voters",
        ),
        (
            "node.id = 1\ndata.dir = '/d'\ncontroller.quorum.voters = 'h:1'",
            "'h:1' is not a controller; write id@host:port",
        ),
        (
            "node.id = 1\ndata.dir = '/d'\ncontroller.quorum.voters = '1@h:1,1@h:2'",
            "names a node id twice",
        ),
    ],
)
def test_what_must_be_set(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        NodeConfig.load(write(tmp_path, text))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read /no/such\.toml: No such file"):
        NodeConfig.load(Path("/no/such.toml"))


def test_two_overrides_of_one_setting_are_refused_rather_than_chosen(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--set: node\.id is set twice"):
        NodeConfig.load(write(tmp_path, MINIMAL), overrides=["node.id=4", "node.id = 5"])


def test_an_override_must_be_a_pair(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="key=value is wanted"):
        NodeConfig.load(write(tmp_path, MINIMAL), {}, ["flush.policy"])


def test_a_broker_alone_needs_not_be_a_voter(tmp_path: Path) -> None:
    text = "node.id = 9\nnode.roles='broker'\ndata.dir='/d'\ncontroller.quorum.voters='1@h:1'\n"
    assert NodeConfig.load(write(tmp_path, text)).roles == {"broker"}


TLS = "tls.ca = '/ca'\ntls.certificate = '/c'\ntls.key = '/k'\n"
OPEN = "controller.listen = '0.0.0.0:10092'\n"


@pytest.mark.parametrize(
    "extra",
    [
        OPEN + TLS,
        OPEN + "controller.insecure.allow = true\n",
        OPEN + "node.roles = 'broker'\n",
        "controller.listen = 'localhost:1'\n",
        "controller.listen = '[::1]:1'\n",
        "controller.listen = '127.1.2.3:1'\n",
    ],
)
def test_where_a_controller_may_listen(tmp_path: Path, extra: str) -> None:
    assert NodeConfig.load(write(tmp_path, MINIMAL + extra))


def test_tls_files_and_where_followers_are_served(tmp_path: Path) -> None:
    assert NodeConfig.load(write(tmp_path, MINIMAL)).tls_files is None
    config = NodeConfig.load(write(tmp_path, MINIMAL + TLS + "broker.listen = '127.0.0.2:1'\n"))
    assert config.tls_files == TlsFiles(Path("/ca"), Path("/c"), Path("/k"))
    assert config.replication_address == ("127.0.0.2", 0)
    more = "tls.client.auth = 'none'\nreplication.listen = '127.0.0.1:5'\n"
    config = NodeConfig.load(write(tmp_path, MINIMAL + TLS + more))
    assert config.replication_address == ("127.0.0.1", 5)
    assert config.frames_address == ("127.0.0.1", 0)
    more = "replication.frames.listen = '127.0.0.3:6'\n"
    assert NodeConfig.load(write(tmp_path, MINIMAL + more)).frames_address == ("127.0.0.3", 6)


def test_every_key_says_what_it_does() -> None:
    for key, _, documentation in describe_keys():
        assert documentation.endswith("."), key
