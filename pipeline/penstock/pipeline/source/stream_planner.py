"""How far each micro-batch of a stream reads: decisions, apart from whoever asks the cluster.

A checkpoint has where each batch ends, and nothing of where the first one began. So where that can
be another place when it is looked for again ("latest" is), the first batch is empty and ends where
it begins: from then on the checkpoint has it, and a crash loses nothing.

A partition that was read keeps its position while it is not there, in the checkpoint too: one that
is missing from an answer and comes back would otherwise be new, and be read twice. The position
goes when its topic's name is another topic's, or when its log was cut before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from penstock.client import TopicPartition
from penstock.pipeline.source.losses import lost
from penstock.pipeline.source.offsets import Offsets
from penstock.pipeline.source.planning import available, limited, ranges, step
from penstock.pipeline.source_options import SourceOptions

Weigh = Callable[[Offsets], Mapping[TopicPartition, float]]
"""About how many bytes an offset of each partition is, from these offsets on."""


@dataclass(slots=True)
class StreamPlanner:
    """What one stream remembers from batch to batch. Belongs to one query's run."""

    options: SourceOptions
    missing: frozenset[TopicPartition] = frozenset()
    """Partitions that were not there when the batch before was planned."""
    anchor: Offsets | None = None
    """Where the first batch is to end, that is yet to come."""
    target: Offsets | None = None
    """Where an AvailableNow query ends."""
    last_ms: float = float("-inf")
    """When a batch was planned last."""

    def begin(self, initial: Offsets, *, is_fixed: bool) -> None:
        """Note where a query begins that has no checkpoint yet."""
        self.anchor = None if is_fixed else dict(initial)

    def end_at(self, target: Offsets) -> None:
        """Read up to there and no further (Trigger.AvailableNow)."""
        self.target = dict(target)

    def next_end(
        self,
        start: Offsets,
        latest: Offsets,
        topic_ids: Mapping[str, str],
        *,
        known_ids: Mapping[str, str],
        earliest: Callable[[Iterable[TopicPartition]], Offsets],
        weigh: Weigh,
        now_ms: float,
        unlimited: bool = False,
    ) -> Offsets:
        """Where the batch ends that begins at ``start``; ``start`` itself for no batch.

        ``latest`` are the ends of what may be read, of the partitions that are there; ``topic_ids``
        the ids of their topics, ``known_ids`` those that belong to ``start``. ``unlimited`` leaves
        the options' limits out (Trigger.Once). Raises DataLossError, unless the query is to go on:
        then what is lost is begun anew where its log begins.
        """
        anchor, self.anchor = self.anchor, None
        others = replaced(topic_ids, known_ids)
        if anchor is not None and anchor == start and not unlimited and not others:
            return start
        ends = self._wanted(start, latest)
        cut = self._losses(start, latest, others)
        kept = {
            one: offset
            for one, offset in start.items()
            if one in ends and one not in cut and one.topic not in others
        }
        new = [one for one in ends if one not in kept]
        end = step(kept, ends, earliest(new) if new else {})
        if not unlimited:
            end = self._limited(kept, end, weigh, now_ms)
        end |= {
            one: offset
            for one, offset in start.items()
            if one not in end and one.topic not in others
        }
        if end != start:
            self.last_ms = now_ms
        return end

    def _wanted(self, start: Offsets, latest: Offsets) -> Offsets:
        """Where to read to at most: of AvailableNow what was there when it began."""
        if self.target is None:
            return latest
        # What is behind the target already (by an earlier run's checkpoint) stays where it is.
        return {
            one: max(min(self.target[one], offset), min(start.get(one, 0), offset))
            for one, offset in latest.items()
            if one in self.target
        }

    def _losses(
        self, start: Offsets, latest: Offsets, others: frozenset[str]
    ) -> set[TopicPartition]:
        """Say what is lost; the partitions of the same topic whose logs were cut."""
        fail = self.options.fail_on_data_loss
        cut: set[TopicPartition] = set()
        for topic in sorted(others & {one.topic for one in start}):
            lost(f"topic {topic} was deleted and made anew since it was read", fail=fail)
        missing = frozenset(one for one in start if one not in latest and one.topic not in others)
        for one in sorted(missing - self.missing):
            lost(
                f"partition {one} is not there any more, and was read up to offset {start[one]}",
                fail=fail,
            )
        self.missing = missing
        for one, offset in start.items():
            if one in latest and offset > latest[one] and one.topic not in others:
                lost(
                    f"partition {one} was read up to offset {offset}, and ends at {latest[one]} "
                    "now: it was cut, or its topic was deleted and made anew",
                    fail=fail,
                )
                cut.add(one)
        return cut

    def _limited(self, start: Offsets, end: Offsets, weigh: Weigh, now_ms: float) -> Offsets:
        options = self.options
        # At the end of AvailableNow fewer than the least must do: no more will come.
        if options.min_offsets is not None and self.target is None:
            too_few = 0 < available(start, end) < options.min_offsets
            if too_few and now_ms - self.last_ms < options.max_delay_ms:
                return {one: start.get(one, offset) for one, offset in end.items()}
        if options.max_offsets is not None:
            end = limited(start, end, options.max_offsets)
        if options.max_bytes is not None and (wanted := ranges(start, end)):
            weights = weigh({one.partition: one.start for one in wanted})
            end = limited(start, end, options.max_bytes, weights)
        return end


def replaced(topic_ids: Mapping[str, str], known_ids: Mapping[str, str]) -> frozenset[str]:
    """The topics whose names are those of other topics now; where no id is known, none."""
    return frozenset(topic for topic, one in topic_ids.items() if known_ids.get(topic, one) != one)
