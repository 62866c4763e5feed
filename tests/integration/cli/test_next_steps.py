"""What a refusal says to do next is done to the letter, and then the command goes through."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from tests.integration.cli.dev_cluster import DevCluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

TWO_MEGABYTES = b"x" * 2_000_000 + b"\n"


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    cluster = DevCluster(tmp_path_factory.mktemp("steps") / "data", 27_300)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def step_of(errors: str) -> str:
    """The line that says what to do next."""
    [step] = [line for line in errors.splitlines() if line.startswith("next: ")]
    return step


def follow(dev: DevCluster, errors: str) -> None:
    """Run the one command that the next step names."""
    [command] = [part for part in step_of(errors).split("`")[1::2] if " NAME" not in part][-1:]
    program, *arguments = shlex.split(command)
    assert program == "penstock"
    dev.ok(*arguments)


def goes_through(dev: DevCluster, *arguments: str, stdin: bytes) -> None:
    """The command succeeds once its leader has heard of the new configs."""
    wait_until(lambda: dev.run(*arguments, stdin=stdin).status == 0, f"{arguments} to succeed")


def test_a_record_without_a_key_is_given_one_or_the_topic_is_not_compacted(
    dev: DevCluster,
) -> None:
    dev.ok("topics", "create", "state", "--config", "cleanup.policy=compact")
    errors = dev.refused("produce", "state", stdin=b"k=v\n")
    assert "--key-separator" in step_of(errors)
    dev.ok("produce", "state", "--key-separator", "=", stdin=b"k=v\n")
    follow(dev, errors)
    goes_through(dev, "produce", "state", stdin=b"k=v\n")


@pytest.mark.parametrize(
    "configs",
    [
        [],
        ["segment.bytes=1048576"],
        ["max.message.bytes=4000000"],
        ["segment.bytes=1048576", "max.message.bytes=1000000"],
    ],
    ids=["defaults", "segment", "message", "both"],
)
def test_a_topic_takes_a_large_record_once_its_limits_are_raised(
    dev: DevCluster, configs: list[str]
) -> None:
    topic = f"large-{len(configs)}-{len(''.join(configs))}"
    dev.ok("topics", "create", topic, *(part for one in configs for part in ("--config", one)))
    errors = dev.refused("produce", topic, stdin=TWO_MEGABYTES)
    assert "--max-request-size BYTES" in step_of(errors)
    larger = ("produce", topic, "--max-request-size", "3000000")
    result = dev.run(*larger, stdin=TWO_MEGABYTES)
    if result.status:
        follow(dev, result.stderr)
    goes_through(dev, *larger, stdin=TWO_MEGABYTES)


def test_limits_that_no_large_record_could_meet_are_refused(dev: DevCluster) -> None:
    sizes = ("--config", "max.message.bytes=4000000", "--config", "segment.bytes=1048576")
    errors = dev.refused("topics", "create", "tight", *sizes)
    assert "max.message.bytes=4000000 is above segment.bytes=1048576" in errors
    assert "next: correct what --config KEY=VALUE names" in errors
    dev.ok("topics", "create", "tight", *sizes[2:])
    errors = dev.refused("topics", "alter", "tight", *sizes[:2])
    assert "set segment.bytes to at least 4000000" in errors
    dev.ok("topics", "alter", "tight", *sizes[:2], "--config", "segment.bytes=4000000")
    assert "max.message.bytes to at most" in dev.refused("topics", "alter", "tight", *sizes[2:])


def test_records_are_deleted_before_an_offset_that_is_there(dev: DevCluster) -> None:
    for topic, configs in (("pruned", []), ("compacted", ["--config", "cleanup.policy=compact"])):
        dev.ok("topics", "create", topic, "--partitions", "2", *configs)
        for _ in range(3):
            dev.ok("produce", topic, "--key-separator", ":", stdin=b"k:v\n")
        delete = ("topics", "delete-records", topic, "--before")
        errors = dev.refused(*delete, "0=9", "--before", "1=9")
        assert "up to the high watermark" in errors
        assert "an offset up to that, or delete all with --before PARTITION=end" in step_of(errors)
        starts = dev.ok(*delete, "0=end", "--before", "1=end")
        assert sorted(line[-1] for line in starts.splitlines()) == ["0", "3"]
        errors = dev.refused(*delete, "2=0")
        assert "has no partition 2; it has 0 to 1" in errors
        assert step_of(errors) == "next: name one of these"
    errors = dev.refused("topics", "delete-records", "prunned", "--before", "0=end")
    assert "did you mean 'pruned'?" in errors
    assert "`penstock topics list`" in step_of(errors)


def test_configs_are_reset_by_either_name_of_the_option(dev: DevCluster) -> None:
    dev.ok("topics", "create", "reset", "--config", "retention.ms=1000")
    errors = dev.refused("topics", "alter", "reset", "--reset", "retention.m")
    assert "did you mean 'retention.ms'?" in errors
    assert step_of(errors) == "next: correct what --config KEY=VALUE or --reset KEY names"
    errors = dev.refused("cluster", "alter", "--reset", "leader.imbalance.enabled")
    assert step_of(errors) == "next: correct what --config KEY=VALUE or --reset KEY names"
    for option in ("--reset", "--delete-config"):
        dev.ok("topics", "alter", "reset", option, "retention.ms")
        dev.ok("cluster", "alter", option, "leader.imbalance.enable")
