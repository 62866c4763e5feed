"""The command as a whole: help, mistakes, failures and exit statuses."""

from __future__ import annotations

import errno
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from penstock.cli import topics
from penstock.cli.app import app
from penstock.cli.errors import NEXT_STEPS, NODE_STEPS, explain
from penstock.cli.installation import BROKER_PACKAGES, CHAOS_PACKAGES
from penstock.cli.settings import Settings
from penstock.client.descriptions import OutOfSyncReplica, PartitionDescription, TopicDescription
from penstock.raft_meta.damage import damaged
from penstock.wire.errors import (
    ERRORS,
    AccessForbiddenError,
    BootstrapError,
    ConfigurationError,
    ConsumerStalledError,
    DataDirectoryError,
    DeliveryTimeoutError,
    EligibleLeadersNotAvailableError,
    InconsistentClusterIdError,
    InvalidGroupIdError,
    InvalidRequestError,
    NotEnoughReplicasError,
    PenstockError,
    UnknownTopicOrPartitionError,
    UnsupportedVersionError,
)


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=environment)


class FakeAdmin:
    """Answers with one topic, or raises; remembers the settings that it was made with."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []
        self.error: BaseException | None = None

    @contextmanager
    def connect(self, settings: Settings) -> Iterator[FakeAdmin]:
        self.settings.append(settings)
        yield self

    def list_topics(self, *, include_internal: bool = False) -> list[TopicDescription]:
        if self.error is not None:
            raise self.error
        partition = PartitionDescription(0, 1, 4, (1, 2, 3), (1, 2), (3,), 9, (3,))
        return [TopicDescription("orders", "id", False, {"retention.ms": "5"}, (partition,))]

    def describe_topics(
        self, names: list[str], *, out_of_sync: bool = False
    ) -> list[TopicDescription]:
        assert out_of_sync
        [topic] = self.list_topics()
        why = (OutOfSyncReplica(3, "offline"),)
        return [replace(topic, partitions=(replace(topic.partitions[0], out_of_sync=why),))]


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    fake = FakeAdmin()
    monkeypatch.setattr(topics, "admin_client", fake.connect)
    monkeypatch.delenv("PENSTOCK_BOOTSTRAP", raising=False)
    return fake


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["topcs"], "Did you mean 'topics'?"),
        (["topics", "creat", "x"], "Did you mean 'create'?"),
        (["topics", "create", "x", "--partition", "3"], "--partitions"),
        (["consume", "x", "--from-begining"], "--from-beginning"),
    ],
)
def test_a_mistyped_word_names_the_near_one(arguments: list[str], wanted: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert wanted in result.stderr
    assert "--help" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["topics", "create"], "Missing argument"),
        (["topics", "create", "x", "--partitions", "many"], "Invalid value for '--partitions'"),
        (["topics", "create", "x", "--config", "nonsense"], "'nonsense' is not KEY=VALUE"),
        (["topics", "create", "x", "--config", "a=1", "--config", "a=2"], "'a' is set twice"),
        (["topics", "alter", "x", "--config", "a=1", "--config", " a=1"], "'a' is set twice"),
        (["cluster", "alter", "--config", "a=1", "--config", "a=2"], "'a' is set twice"),
        (["topics", "alter", "x"], "name what to change"),
        (
            ["topics", "alter", "x", "--partitions", "99999999999"],
            "Invalid value for '--partitions'",
        ),
        (
            ["topics", "create", "x", "--partitions", "99999999999"],
            "Invalid value for '--partitions'",
        ),
        (
            ["topics", "create", "x", "--replication-factor", "99999999999"],
            "Invalid value for '--replication-factor'",
        ),
        (["topics", "delete-records", "x"], "Missing option '--before'"),
        (["topics", "delete-records", "x", "--before", "7"], "'7' is not KEY=VALUE"),
        (["topics", "delete-records", "x", "--before", "0=-1"], "'-1' is no whole number from 0"),
        (["topics", "delete-records", "x", "--before", "x=1"], "'x' is no whole number from 0"),
        (["topics", "delete-records", "x", "--before", "0=1", "--before", "0=2"], "set twice"),
        (["partitions", "elect", "x:99999999999"], "no topic has a partition 99999999999"),
        (["partitions", "reassign", "x", "--replicas", "99999999999"], "is not a list of node"),
        (["partitions", "reassign", "x", "--to", "1"], "goes with --from-broker"),
        (
            ["partitions", "reassign", "--from-broker", "1", "--to", "2,1"],
            "broker 1 is to lose its replicas",
        ),
        (["quorum", "remove", "99999999999"], "Invalid value for 'node'"),
        (["cluster", "unregister", "99999999999"], "Invalid value for 'NODE'"),
        (
            ["cluster", "upgrade", "--metadata-version", "99999999999"],
            "Invalid value for '--metadata-version'",
        ),
        (["topics", "alter", "x", "--config", "a=1", "--reset", "a"], "'a' is set as well"),
        (["produce", "x", "--acks", "2"], "'--acks': '2' is not one of 'all', '1', '0'"),
        (
            ["produce", "x", "--compression", "zip"],
            "'zip' is not one of 'none', 'gzip', 'snappy', 'lz4', 'zstd'",
        ),
        (["produce", "x", "--key-regex", "("], "not a regular expression"),
        (["produce", "x", "--key-regex", "a", "--key-separator", ":"], "choose one of"),
        (["consume", "x", "--offset", "3"], "name it with --partition"),
        (["consume", "x", "--partition", "0", "--group", "g"], "leave --group or --partition out"),
        (["consume", "x", "--partition", "0", "--offset", "soon"], "'soon' is neither"),
        (
            ["consume", "x", "--partition", "0", "--offset", "3", "--from-beginning"],
            "choose one of --offset and --from-beginning",
        ),
        (["format", "--node-id", "1"], "Missing option '--data-dir'"),
    ],
)
def test_a_command_line_that_cannot_be_meant_says_why(arguments: list[str], wanted: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert wanted in result.stderr
    assert len(result.stderr.strip().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            ["dev"],
            ["[default: (3, or ", "[default: (9092, or ", "[default: (a temporary directory)]"],
        ),
        (
            ["topics", "create"],
            ["[default: 1]", "[default: (3, or all live brokers where they are fewer)]"],
        ),
        (
            ["produce"],
            [
                *("<all|1|0>", "[default: all]", "<none|gzip|snappy|lz4|zstd>", "[default: none]"),
                *("[default: 30.0]", "[default: 1048576]", "[default: (standard input)]"),
            ],
        ),
        (
            ["consume"],
            ["[default: (value)]", "[default: ($PENSTOCK_BOOTSTRAP, else localhost:9092)]"],
        ),
        (["node"], ["--config", "--set"]),
    ],
    ids="-".join,
)
def test_help_shows_choices_and_defaults(arguments: list[str], wanted: list[str]) -> None:
    text = " ".join(run(*arguments, "--help", COLUMNS="400").stdout.replace("│", " ").split())
    for part in wanted:
        assert part in text


def test_no_arguments_show_help() -> None:
    result = run()
    assert result.exit_code == 0
    for command in ("dev", "node", "format", "topics", "produce", "consume", "groups", "log"):
        assert command in result.stdout


def test_a_group_of_commands_alone_shows_its_help() -> None:
    result = run("topics")
    assert result.exit_code == 2
    assert "describe" in result.stdout
    assert result.stdout.count("Usage:") == 1


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"penstock \S+ \(record codec: (compiled|pure Python)\)\n", result.stdout)


def test_a_table_for_people(admin: FakeAdmin) -> None:
    result = run("topics", "describe")
    assert result.exit_code == 0, result.output
    assert "Topic: orders" in result.stdout
    assert "PartitionCount: 1  ReplicationFactor: 3  Configs: retention.ms=5" in result.stdout
    header, row = [line.split() for line in result.stdout.splitlines() if line.strip()][1::2][:2]
    assert header == ["Partition", "Leader", "Replicas", "Isr", "Elr", "Offline", "OutOfSync"]
    assert row == ["0", "1", "1,2,3", "1,2", "3", "3", "3", "offline"]


def test_json_for_programs(admin: FakeAdmin) -> None:
    (topic,) = json.loads(run("topics", "list", "--output", "json").stdout)
    assert topic["name"] == "orders"
    assert topic["partitions"][0]["isr"] == [1, 2]
    assert topic["partitions"][0]["out_of_sync"] is None, "a list asks no leader"
    assert json.loads(run("--output", "json", "topics", "list").stdout) == [topic]
    (topic,) = json.loads(run("topics", "describe", "--output", "json").stdout)
    assert topic["partitions"][0]["out_of_sync"] == [{"node_id": 3, "reason": "offline"}]


@pytest.mark.parametrize(
    ("arguments", "environment", "wanted"),
    [
        (["topics", "list"], {}, "localhost:9092"),
        (["topics", "list"], {"PENSTOCK_BOOTSTRAP": "env:1"}, "env:1"),
        (["-b", "root:1", "topics", "list"], {"PENSTOCK_BOOTSTRAP": "env:1"}, "root:1"),
        (["-b", "root:1", "topics", "list", "--bootstrap", "own:1"], {}, "own:1"),
    ],
)
def test_where_the_bootstrap_address_comes_from(
    admin: FakeAdmin, arguments: list[str], environment: dict[str, str], wanted: str
) -> None:
    assert run(*arguments, **environment).exit_code == 0
    assert admin.settings[0].bootstrap == wanted


def test_an_error_is_one_line_and_a_next_step(admin: FakeAdmin) -> None:
    admin.error = BootstrapError("no broker at nowhere:1\n(it resolved to nothing)")
    result = run("topics", "list")
    assert result.exit_code == 1
    assert result.stdout == ""
    first, second = result.stderr.splitlines()
    assert first == "error: no broker at nowhere:1 (it resolved to nothing)"
    assert second.startswith("next: start a cluster with `penstock dev`")


def test_what_an_error_says_to_do_is_not_said_twice() -> None:
    error = InvalidRequestError("controller 1 is the only voter; next: add another one first")
    assert explain(error) == ("error: controller 1 is the only voter\nnext: add another one first")


def test_settings_of_the_client_are_told_as_the_options_that_they_are_here() -> None:
    error = BootstrapError("b:1: it speaks TLS; next: set tls_ca, or tls_certificate and tls_key")
    assert explain(error).splitlines()[1] == "next: set --tls-ca, or --tls-cert and --tls-key"
    error = ConfigurationError("tls_ca: cannot read /a/tls_ca.pem: no; next: see tls.ca, tls_key.")
    assert explain(error) == (
        "error: --tls-ca: cannot read /a/tls_ca.pem: no\nnext: see tls.ca, --tls-key."
    )


def test_a_damaged_journal_is_not_to_be_followed_by_another_directory() -> None:
    text = explain(
        damaged("the Raft journal in /d/raft is damaged: entry 7 is missing"), NODE_STEPS
    )
    problem, step = text.splitlines()
    assert "Do not start this controller with an empty directory" in problem
    assert step.startswith("next: put back a copy of metadata.dir")
    assert "choose another directory" not in text


def test_every_error_of_the_table_can_be_explained() -> None:
    for error_class in ERRORS.values():
        error = error_class("something happened")
        first, second = explain(error).splitlines()
        assert first == "error: something happened"
        assert second.removeprefix("next: ")


def test_the_next_step_is_that_of_the_reason() -> None:
    error = DeliveryTimeoutError("3 records were not acknowledged")
    error.__cause__ = NotEnoughReplicasError("only broker 1 is in sync")
    assert explain(error).endswith(
        "\nnext: start the missing brokers, or accept fewer copies: "
        "`penstock topics alter NAME --config min.insync.replicas=N`"
    )


def test_a_consumer_that_stalls_is_told_what_its_trouble_needs() -> None:
    error = ConsumerStalledError("no record for 10 s")
    error.__cause__ = EligibleLeadersNotAvailableError("orders-0 has no leader")
    assert explain(error).endswith("next: start the brokers that `Isr` and `Elr` name")
    # Partitions without a leader are waited for: another trouble must not be taken for that.
    error.__cause__ = UnsupportedVersionError("too new")
    assert "without a leader" not in explain(error)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (
            DataDirectoryError("/d is in use by another process; stop that node first"),
            "error: /d is in use by another process\nnext: stop that node first",
        ),
        (
            InconsistentClusterIdError("/d belongs to a; b; mount the right disk"),
            "error: /d belongs to a; b\nnext: mount the right disk",
        ),
        (
            DataDirectoryError("cannot use /d: Permission denied"),
            (
                "error: cannot use /d: Permission denied\n"
                "next: choose another directory, or mount the right disk"
            ),
        ),
    ],
)
def test_what_is_wrong_with_a_directory_says_itself_what_to_do(
    error: PenstockError, wanted: str
) -> None:
    assert explain(error) == wanted


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (AccessForbiddenError("not yours"), "name a topic of your own"),
        (InvalidGroupIdError("too long"), "choose a group id of 1 to 255 bytes"),
    ],
)
def test_who_asked_for_the_impossible_is_not_sent_to_the_logs(
    error: PenstockError, wanted: str
) -> None:
    assert f"next: {wanted}" in explain(error)


def steps() -> Iterator[str]:
    yield from NEXT_STEPS.values()
    yield from NODE_STEPS.values()


@pytest.mark.parametrize("step", list(steps()))
def test_a_next_step_names_commands_and_options_that_exist(step: str) -> None:
    quoted = re.findall(r"`penstock ([^`]+)`", step)
    for line in quoted:
        command = get_command(app)
        words = line.split()
        while words and hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {name for param in command.params for name in getattr(param, "opts", [])}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_a_settings_file_that_may_not_be_read_is_not_looked_for_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    file = tmp_path / "node.toml"
    file.write_text("")
    # The tests may run as root, whom nothing is denied.
    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(Path, "is_file", denied)
    result = CliRunner().invoke(app, ["node", "--config", str(file)])
    assert result.exit_code == 2
    problem, step = result.output.splitlines()
    assert problem == f"error: cannot read {file}: Permission denied"
    assert step.startswith("next: have it belong to the user that runs this: `chown ")


@pytest.mark.parametrize(
    ("settings", "error", "step"),
    [
        (["--config", "nope.toml"], "cannot read nope.toml: No such", "name the node's file with"),
        (["--set", "node.idd=1"], "did you mean 'node.id'?", "--set"),
    ],
)
def test_a_node_that_cannot_start_says_what_to_do(
    tmp_path: Path, settings: list[str], error: str, step: str
) -> None:
    result = run("node", *settings)
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert error in first
    assert second.startswith("next: ")
    assert step in second


def test_ctrl_c_leaves_no_traceback(admin: FakeAdmin) -> None:
    admin.error = KeyboardInterrupt()
    result = run("topics", "list")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_a_bug_is_not_hidden(admin: FakeAdmin) -> None:
    admin.error = ZeroDivisionError()
    result = run("topics", "list")
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_closed_pipe_is_quiet() -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _CLOSED_PIPE], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout is not None
    writer.stdout.close()
    assert writer.stderr is not None
    errors = writer.stderr.read()
    writer.stderr.close()
    assert writer.wait(20) == 141
    assert errors == b""


_CLOSED_PIPE = """
import sys
from penstock.cli import topics
from penstock.cli.__main__ import main
from contextlib import contextmanager
class Admin:
    def list_topics(self, include_internal=False):
        raise_when_closed()
def raise_when_closed():
    for _ in range(100_000):
        print("a line that nobody reads")
@contextmanager
def connect(settings):
    yield Admin()
topics.admin_client = connect
sys.argv = ["penstock", "topics", "list"]
main()
"""


def test_without_typer_it_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = None\nfrom penstock.cli.__main__ import main\nmain()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.returncode == 1
    assert 'pip install "penstock[cli]"' in result.stderr
    assert "Traceback" not in result.stderr


WITHOUT_BROKER = """
import sys
ABSENT = {"grpc_health", "grpc_reflection", "lmdb", "prometheus_client", "pysyncobj",
    "structlog", "uvloop"}
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
import runpy
module, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["penstock.cli", "dev", "--data-dir", "data"],
        ["penstock.cli", "node", "--set", "node.id=1"],
        ["penstock.cli.demo"],
        ["penstock.broker", "--set", "node.id=1"],
    ],
    ids=" ".join,
)
def test_without_the_broker_it_says_what_to_install(tmp_path: Path, arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_BROKER, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode != 0
    first, second = result.stderr.splitlines()[-2:]
    assert first.startswith("error: ")
    assert "not installed" in first
    assert second == 'next: pip install "penstock[broker]"'
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "packages"), [("broker", BROKER_PACKAGES), ("chaos", CHAOS_PACKAGES)]
)
def test_all_that_an_extra_installs_is_looked_for(extra: str, packages: dict[str, str]) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    wanted = {
        re.match(r"[\w-]+", requirement).group()
        for requirement in project["project"]["optional-dependencies"][extra]
        if not requirement.startswith("penstock")
    }
    assert set(packages) == wanted
    for module in packages.values():
        assert importlib.util.find_spec(module) is not None


def test_help_loads_neither_grpc_nor_a_broker(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from penstock.cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'grpc', 'uvloop', 'lmdb', 'penstock.client', 'penstock.broker.node'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert result.stderr.strip() == "set()"


def test_a_suggestion_of_the_client_reaches_the_terminal(admin: FakeAdmin) -> None:
    admin.error = UnknownTopicOrPartitionError("unknown topic 'ordrs'; did you mean 'orders'?")
    result = run("topics", "list")
    assert result.exit_code == 1
    assert "did you mean 'orders'?" in result.stderr


def test_the_help_of_groups_describe_says_which_partitions_are_shown() -> None:
    text = " ".join(run("groups", "describe", "--help").stdout.split())
    assert "committed a position for it or a member holds it" in text


def test_the_lines_of_a_help_text_break_where_the_terminal_ends() -> None:
    lines = run("replay", "--help", COLUMNS="80").stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if "What is there when" in line)
    words = " ".join(lines[at : at + 3]).split()
    for line, following in pairwise(lines[at : at + 3]):
        assert len(line.rstrip()) + len(following.split()[0]) >= 78
    assert words[-1] == "failure."


def test_the_command_sets_up_its_allocator_before_anything_else() -> None:
    code = (
        "import sys\n"
        "from penstock.wire import transport\n"
        "transport.tune_malloc = lambda: print('grpc' in sys.modules, 'tuned', flush=True)\n"
        "sys.argv = ['penstock', '--version']\n"
        "from penstock.cli.__main__ import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.startswith("False tuned\npenstock "), done
