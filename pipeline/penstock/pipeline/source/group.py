"""How far a query is, as a consumer group has it: what ``penstock groups describe`` shows.

Spark tells the process that plans a query's batches nothing of the query, and its tasks everything.
So a task of each batch commits where the batch begins: there everything before it is done. That is
a batch late; ``penstock.pipeline.progress`` commits exactly, from the driver. Nothing is ever read
from these offsets, and a commit that fails costs no more than a warning. One that is late, of a
task that was held up or killed, does not set them back behind those of the batches that followed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from pyspark import TaskContext

from penstock.client import AdminClient, PenstockError, TopicPartition
from penstock.client.config import AdminConfig
from penstock.pipeline.option_map import ClientSettings
from penstock.pipeline.source.arrow_reading import Slice
from penstock.pipeline.source_options import SourceOptions

_LOG: Final = logging.getLogger("penstock.pipeline")
_QUERY_ID: Final = "sql.streaming.queryId"
_TIMEOUT_MS: Final = 5_000
_GRACE_S: Final = 1.0
"""A task whose reading is done waits so long for the commit beside it."""


def group_of(prefix: str, query_id: str) -> str:
    """The group id of a query."""
    return f"{prefix}-{query_id}"


def commit_finished(options: SourceOptions, wanted: Slice) -> Callable[[], None]:
    """Commit what the slice says is finished, beside the reading; what is returned waits for it."""
    context = TaskContext.get()
    query_id = context.getLocalProperty(_QUERY_ID) if context is not None else None
    # A second attempt would only say it again.
    if not wanted.finished or not query_id or context is None or context.attemptNumber():
        return lambda: None
    group = group_of(options.group_id_prefix, query_id)
    thread = threading.Thread(
        target=commit, args=(options.clients, group, wanted.finished), daemon=True
    )
    thread.start()
    return lambda: thread.join(_GRACE_S)


def commit(
    clients: ClientSettings, group: str, offsets: Mapping[TopicPartition, int]
) -> PenstockError | None:
    """Commit offsets for a group; why not, where that failed (it is logged)."""
    settings = {**clients.of(AdminConfig), "default_api_timeout_ms": _TIMEOUT_MS}
    try:
        with AdminClient(clients.bootstrap_servers, **settings) as admin:
            admin.alter_group_offsets(group, offsets, only_forward=True)
    except PenstockError as error:
        _LOG.warning(
            "group %s: how far its query is was not committed, so that its lag looks larger than "
            "it is: %s",
            group,
            error,
        )
        return error
    return None
