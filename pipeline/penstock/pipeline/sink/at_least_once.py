"""At least once: tasks write, and what they have written stays, however often they are repeated."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa

from penstock.client import Producer
from penstock.client.config import ProducerConfig
from penstock.pipeline.sink.plan import SinkPlan
from penstock.pipeline.sink.rows import by_topic
from penstock.pipeline.sink.verdict import TaskDone


def write(plan: SinkPlan, batches: Iterator[pa.RecordBatch]) -> TaskDone:
    """In a task: write its rows; all are acknowledged when this returns."""
    client = plan.options.client
    with Producer(client.bootstrap_servers, **client.of(ProducerConfig)) as producer:
        for batch in batches:
            now_ms = int(time.time() * 1000)
            for topic, rows in by_topic(batch, plan.columns, plan.options.topic, now_ms):
                producer.send_arrow(topic, rows)
        producer.flush()
    return TaskDone(None)
