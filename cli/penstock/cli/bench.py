"""`penstock bench`: how fast this machine writes to and reads from a cluster, and at what cost."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.bench_consume import ConsumeMode, ConsumeRun
from penstock.cli.bench_figures import Figures, show
from penstock.cli.bench_produce import LatencyRun, Load, ManyRun, SendRun, warm_up
from penstock.cli.bench_topic import BenchTopic, TopicPlan, bench_topic, readable_records
from penstock.cli.client_warnings import client_warnings
from penstock.cli.errors import EXIT_FAILED, explain, report, with_step
from penstock.cli.interrupts import Interrupt
from penstock.cli.output import format_count
from penstock.cli.pace import Progress
from penstock.cli.produce import ACKS, Acks, Compression
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.config_keys import MAX_INT32
from penstock.wire.errors import ConfigurationError, PenstockError
from penstock.wire.topic_config import MAX_PARTITIONS_PER_TOPIC

if TYPE_CHECKING:
    from penstock.client import Consumer, Producer

_CLIENT_ID: Final = "penstock-bench"
_FILL_BATCH_BYTES: Final = 131_072

app = typer.Typer(
    help="Measure a cluster as clients see it: records a second, CPU time, latencies.",
    no_args_is_help=True,
)


class ProduceMode(enum.StrEnum):
    """How records are written."""

    SEND = "send"
    MANY = "many"


Topic = Annotated[
    str | None,
    typer.Option(
        "--topic",
        metavar="NAME",
        help="The topic. One that is not there is made for the run and deleted after it.",
        show_default="one made for the run",
    ),
]
Partitions = Annotated[
    int,
    typer.Option(
        "--partitions",
        min=1,
        max=MAX_PARTITIONS_PER_TOPIC,
        help="Partitions of a topic that is made for the run.",
    ),
]
ReplicationFactor = Annotated[
    int | None,
    typer.Option(
        "--replication-factor",
        min=1,
        max=MAX_INT32,
        help="Copies of each partition of a topic that is made for the run.",
        show_default="3, or all live brokers where they are fewer",
    ),
]
Keep = Annotated[
    bool, typer.Option("--keep", help="Do not delete the topic that was made for the run.")
]
Records = Annotated[int, typer.Option("--records", min=1, help="How many records.")]
Size = Annotated[
    int, typer.Option("--size", min=0, metavar="BYTES", help="How large each record's value is.")
]
AcksOption = Annotated[
    Acks,
    typer.Option(
        "--acks",
        help="Who must hold a record: all in-sync replicas, 1 (the leader), or 0 (nobody).",
    ),
]
CompressionOption = Annotated[
    Compression, typer.Option("--compression", help="How batches of records are compressed.")
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        min=1,
        max=MAX_INT32,
        metavar="BYTES",
        help="At this size a batch leaves.",
        show_default="the client's batch_size",
    ),
]
LingerMs = Annotated[
    int | None,
    typer.Option(
        "--linger-ms",
        min=0,
        max=MAX_INT32,
        help="How long a batch waits for more records, in milliseconds.",
        show_default="the client's linger_ms",
    ),
]


@app.command("produce")
def produce(
    ctx: typer.Context,
    *,
    records: Records = 1_000_000,
    size: Size = 100,
    acks: AcksOption = Acks.ALL,
    rate: Annotated[
        float,
        typer.Option("--rate", min=0, help="Records a second; 0 for as many as there can be."),
    ] = 0,
    mode: Annotated[
        ProduceMode,
        typer.Option(
            "--mode",
            help="send: one call for each record; many: send_many, one for thousands of them.",
        ),
    ] = ProduceMode.SEND,
    compression: CompressionOption = Compression.NONE,
    batch_size: BatchSize = None,
    linger_ms: LingerMs = None,
    topic: Topic = None,
    partitions: Partitions = 6,
    replication_factor: ReplicationFactor = None,
    keep: Keep = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Write records as an application does, and print how fast and at what cost.

    Every future is kept and looked at; a failed record makes the exit status 1. One record in some
    hundreds is timed, from send to acknowledgement; of send_many each call. CPU time is this
    client's, without the brokers'. One record to each partition comes first, uncounted. Ctrl-C
    prints what was measured so far.
    """
    settings = resolve(ctx, bootstrap, output)
    plan = TopicPlan(topic, partitions, replication_factor, keep)
    producing = _Producing(acks, compression, batch_size, linger_ms)
    with _run(settings, plan) as run, run.producer(producing) as producer:
        is_many = mode is ProduceMode.MANY
        load = Load(run.topic.name, records, size, rate, many=is_many)
        _warm_up(run, producer, load)
        way = ManyRun if is_many else SendRun
        run.figures = way(producer, load, run.interrupt).run(Progress("sent", records))


@app.command("latency")
def latency(
    ctx: typer.Context,
    *,
    records: Records = 2_000,
    size: Size = 100,
    acks: AcksOption = Acks.ALL,
    rate: Annotated[float, typer.Option("--rate", min=0.1, help="Records a second.")] = 200,
    compression: CompressionOption = Compression.NONE,
    batch_size: BatchSize = None,
    linger_ms: LingerMs = None,
    topic: Topic = None,
    partitions: Partitions = 6,
    replication_factor: ReplicationFactor = None,
    keep: Keep = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Write at a steady rate, and print how long acknowledgements take.

    Each record is timed, from send to acknowledgement; --linger-ms 0 leaves out what a batch waits
    for company. The longest time without an acknowledgement is what a fail-over costs: kill a node
    while it runs. One record to each partition comes first, uncounted. Ctrl-C prints what was
    measured so far.
    """
    settings = resolve(ctx, bootstrap, output)
    plan = TopicPlan(topic, partitions, replication_factor, keep)
    producing = _Producing(acks, compression, batch_size, linger_ms)
    with _run(settings, plan) as run, run.producer(producing) as producer:
        load = Load(run.topic.name, records, size, rate)
        _warm_up(run, producer, load)
        run.figures = LatencyRun(producer, load, run.interrupt).run(Progress("sent", records))


@app.command("consume")
def consume(
    ctx: typer.Context,
    *,
    records: Annotated[
        int, typer.Option("--records", min=1, help="How many records, or all that there are.")
    ] = 1_000_000,
    size: Annotated[
        int,
        typer.Option(
            "--size",
            min=0,
            metavar="BYTES",
            help="How large each value is that is written into a topic made for the run.",
        ),
    ] = 100,
    mode: Annotated[
        ConsumeMode,
        typer.Option(
            "--mode",
            help="iterate: one record at a time; poll: lists of them; poll_batch: lists by "
            "partition; arrow: tables of fetch_arrow, which needs pyarrow.",
        ),
    ] = ConsumeMode.ITERATE,
    compression: CompressionOption = Compression.NONE,
    topic: Topic = None,
    partitions: Partitions = 6,
    replication_factor: ReplicationFactor = None,
    keep: Keep = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Read records from the beginning, and print how fast and at what cost.

    A topic that is made for the run is filled first, uncounted. Of one that is there, --records are
    read, or what there is; its size in bytes is judged by one record of each call. A call (of
    iteration: 500 records) is what the latencies are of. Ctrl-C prints what was measured so far.
    """
    settings = resolve(ctx, bootstrap, output)
    plan = TopicPlan(topic, partitions, replication_factor, keep)
    with _run(settings, plan) as run:
        if run.topic.is_new:
            producing = _Producing(Acks.ALL, compression, _FILL_BATCH_BYTES, None)
            with run.producer(producing) as producer:
                load = Load(run.topic.name, records, size, 0)
                filled = SendRun(producer, load, run.interrupt).run(Progress("written", records))
            if filled.first_error is not None:
                raise filled.first_error
        if run.interrupt.count:
            return
        wanted = min(records, readable_records(settings, run.topic))
        if not wanted:
            raise with_step(
                ConfigurationError(f"topic {run.topic.name} has no records to read"),
                "write some with `penstock bench produce --topic NAME`, or leave --topic out",
            )
        with run.consumer() as consumer:
            reading = ConsumeRun(consumer, mode, run.topic.name, wanted, run.interrupt)
            run.figures = reading.run(Progress("read", wanted))


@dataclass(frozen=True, slots=True)
class _Producing:
    """How a producer is set up; None leaves a setting as the client has it."""

    acks: Acks
    compression: Compression
    batch_size: int | None
    linger_ms: int | None

    def settings(self) -> dict[str, Any]:
        given = {"batch_size": self.batch_size, "linger_ms": self.linger_ms}
        return {
            "acks": ACKS[self.acks],
            "compression": self.compression.value,
            **{name: value for name, value in given.items() if value is not None},
        }


@dataclass(slots=True)
class _Run:
    """One run of a benchmark: where, and what came of it."""

    settings: Settings
    topic: BenchTopic
    interrupt: Interrupt
    figures: Figures | None = None

    @contextmanager
    def producer(self, producing: _Producing) -> Iterator[Producer]:
        from penstock.client import Producer  # noqa: PLC0415 - it imports gRPC.

        tls = self.settings.tls.client_settings()
        producer = Producer(
            self.settings.bootstrap, client_id=_CLIENT_ID, **producing.settings(), **tls
        )
        try:
            yield producer
        finally:
            with suppress(PenstockError):  # What failed was found at its future.
                producer.close(timeout_ms=0)

    @contextmanager
    def consumer(self) -> Iterator[Consumer]:
        from penstock.client import Consumer  # noqa: PLC0415 - it imports gRPC.

        tls = self.settings.tls.client_settings()
        consumer = Consumer(
            self.settings.bootstrap, client_id=_CLIENT_ID, auto_offset_reset="earliest", **tls
        )
        try:
            with self.interrupt.may_break():
                consumer.partitions_for(self.topic.name)  # Connects.
                consumer.subscribe([self.topic.name])
            yield consumer
        finally:
            consumer.close()


@contextmanager
def _run(settings: Settings, plan: TopicPlan) -> Iterator[_Run]:
    """Run a benchmark inside, then print its figures and end with its exit status."""
    interrupt = Interrupt()
    run: _Run | None = None
    with client_warnings(), interrupt.installed(), bench_topic(settings, plan) as topic:
        run = _Run(settings, topic, interrupt)
        yield run
    figures = run.figures if run is not None else None
    if figures is not None:
        _tell(figures, settings)
    if interrupt.count:
        raise typer.Exit(interrupt.exit_status)
    if figures is not None and figures.first_error is not None:
        raise typer.Exit(EXIT_FAILED)


def _warm_up(run: _Run, producer: Producer, load: Load) -> None:
    with run.interrupt.may_break():
        warm_up(producer, load.topic, run.topic.partitions, load.values()[0])


def _tell(figures: Figures, settings: Settings) -> None:
    error = figures.first_error
    if error is not None and not figures.records:
        raise error  # It never began: the error says all there is.
    show(figures, as_json=settings.as_json)
    if error is not None:
        count = format_count(figures.errors)
        report(explain(error).replace("error: ", f"error (the first of {count}): ", 1))
