# The way of plain records into batches that are open already: part of ``_codec.pyx``.
#
# Nothing here waits, takes a lock or runs Python code between looking at a batch and adding to it,
# so each record is added in one piece as far as other threads can tell: they run only where the
# interpreter lets them. What may run Python code (an allocation can start the garbage collector)
# comes before the look.

cdef extern from "<time.h>" nogil:
    cdef struct timespec:
        int64_t tv_sec
        long tv_nsec
    int TIME_UTC
    int timespec_get(timespec* time, int base)

cdef tuple _NO_ARGUMENTS = ()
cdef bytes _NO_HEADERS = b"\x00"
cdef Py_ssize_t _BOUND_BYTES = reference.RECORD_BOUND_BYTES


cdef inline int64_t wall_ms() noexcept:
    cdef timespec now
    timespec_get(&now, TIME_UTC)
    return <int64_t>now.tv_sec * 1000 + now.tv_nsec // 1_000_000


cdef uint32_t murmur2(const uint8_t* key, Py_ssize_t size) noexcept nogil:
    """MurmurHash2, 32 bits, with Kafka's seed."""
    cdef uint32_t m = 0x5BD1E995, h = <uint32_t>0x9747B28C ^ <uint32_t>size, k
    while size >= 4:
        k = key[0] | <uint32_t>key[1] << 8 | <uint32_t>key[2] << 16 | <uint32_t>key[3] << 24
        k *= m
        k ^= k >> 24
        h = h * m ^ k * m
        key += 4
        size -= 4
    if size:
        k = 0
        while size:
            size -= 1
            k = k << 8 | key[size]
        h = (h ^ k) * m
    h = (h ^ h >> 13) * m
    return h ^ h >> 15


cdef inline bint is_plain(object data) noexcept:
    return data is None or PyBytes_CheckExact(data)


def first_odd(list data, Py_ssize_t max_bytes):
    cdef Py_ssize_t at
    cdef object one
    for at in range(len(data)):
        one = data[at]
        if one is not None and (not PyBytes_CheckExact(one) or PyBytes_GET_SIZE(one) > max_bytes):
            return at
    return len(data)


cdef class Strings:
    """The buffers are looked at again with each string: whoever made them may have written since."""

    cdef Bytes _offsets, _data, _validity
    cdef const int32_t* _ends
    cdef const uint8_t* _bits
    cdef Py_ssize_t _first, _count
    cdef readonly Py_ssize_t longest

    def __init__(self, column, Py_ssize_t first, Py_ssize_t count):
        cdef Span one
        cdef Py_ssize_t at
        cdef bint has_validity = column.validity is not None
        self._count = 0
        self._offsets, self._data = Bytes(column.offsets), Bytes(column.data)
        self._validity = Bytes(column.validity) if has_validity else None
        self._ends = <const int32_t*>self._offsets.start
        self._bits = self._validity.start if has_validity else NULL
        self._first = first
        self.longest = 0
        cdef bint sound = first >= 0 and count >= 0 and first <= self._offsets.size // 4 - 1 - count
        if sound and has_validity and (first + count + 7) // 8 > self._validity.size:
            sound = False
        cdef Py_ssize_t most = count if sound else 0
        for at in range(most):
            if not self.get(at, &one):
                sound = False
                break
            if one.size > self.longest:
                self.longest = one.size
        if not sound:
            reference.Strings(column, first, count)  # Says what is wrong.
            raise ValueError("the strings are not there")
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, number):
        cdef Py_ssize_t at = number
        cdef Span one
        if not 0 <= at < self._count:
            raise IndexError(f"there is no string {number} of {self._count}")
        if not self.get(at, &one):
            raise ValueError(f"string {number} is not within the data any more")
        return as_object(one)

    cdef inline bint get(self, Py_ssize_t at, Span* out) noexcept:
        """Whether it is there. The caller has seen to it that there are so many."""
        cdef Py_ssize_t place = self._first + at
        cdef int32_t start = self._ends[place], end = self._ends[place + 1]
        if not 0 <= start <= end <= self._data.size:
            return False
        out.start, out.size = self._data.start + start, end - start
        if self._bits != NULL and not self._bits[place >> 3] >> (place & 7) & 1:
            out.size = -1
        return True


def join_headers(offsets, Strings names, Strings values):
    cdef Bytes held = Bytes(offsets)
    cdef const int32_t* ends = <const int32_t*>held.start
    cdef Py_ssize_t count = held.size // 4 - 1, size = 0, record, at
    cdef bytearray out_offsets, out
    cdef int32_t* out_ends
    cdef uint8_t* start
    cdef uint8_t* to
    cdef uint8_t* end
    cdef Span name, value
    if count < 0 or ends[0] != 0 or ends[count] != names._count or ends[count] != values._count:
        return None
    for record in range(count):
        if ends[record] > ends[record + 1]:
            return None
        size += size_of(zigzag(ends[record + 1] - ends[record]))
    for at in range(names._count):
        if not names.get(at, &name) or not values.get(at, &value) or not is_text(name):
            return None
        size += bytes_size(name) + bytes_size(value)
    if size > INT32_MAX:
        return None
    out_offsets = PyByteArray_FromStringAndSize(NULL, 4 * (count + 1))
    out = PyByteArray_FromStringAndSize(NULL, size)
    out_ends = <int32_t*>PyByteArray_AS_STRING(out_offsets)
    start = to = <uint8_t*>PyByteArray_AS_STRING(out)
    end = start + size
    out_ends[0] = 0
    for record in range(count):
        # Whoever made the columns may have written to them since they were measured.
        if not 0 <= ends[record] <= ends[record + 1] <= names._count:
            return None
        if size_of(zigzag(ends[record + 1] - ends[record])) > end - to:
            return None
        to = write_varint(to, zigzag(ends[record + 1] - ends[record]))
        for at in range(ends[record], ends[record + 1]):
            if not names.get(at, &name) or not values.get(at, &value) or name.size < 0:
                return None
            if bytes_size(name) + bytes_size(value) > end - to:
                return None
            to = write_bytes(write_bytes(to, name), value)
        out_ends[record + 1] = <int32_t>(to - start)
    return Strings(BytesColumn(None, 0, out_offsets, out), 0, count)


cdef bint is_text(Span data) except -1:
    """Whether it is UTF-8, and not null."""
    cdef int64_t at = 0
    while at < data.size and data.start[at] < 0x80:
        at += 1
    if at < data.size:
        try:
            PyUnicode_DecodeUTF8(<const char*>data.start, data.size, NULL)
        except UnicodeDecodeError:
            return False
    return data.size >= 0


cdef class ManyBytes:
    """As many byte strings as there are records, in a list or a column; or none at all."""

    cdef list _list
    cdef Strings _strings

    def __cinit__(self, data):
        if data is not None and type(data) is not list:
            self._strings = data
        else:
            self._list = data

    cdef inline bint has(self, Py_ssize_t count) noexcept:
        """Whether there are so many still, or none at all: lists change."""
        if self._strings is not None:
            return self._strings._count == count
        return self._list is None or PyList_GET_SIZE(self._list) == count

    cdef inline bint get(self, Py_ssize_t at, Span* out) noexcept:
        """Whether it is a null or plain bytes. They stay where they are until Python code runs."""
        cdef PyObject* one
        if self._strings is not None:
            return self._strings.get(at, out)
        if self._list is None:
            out.start, out.size = NULL, -1
            return True
        one = PyList_GET_ITEM(self._list, at)
        if not is_plain(<object>one):
            return False
        out[0] = span_of(<object>one)
        return True


cdef inline int64_t whole_place(object partition) noexcept:
    """The number of a partition; -1 for none, and -2 for what is no such number."""
    cdef int overflow = 0
    cdef long long number
    if partition is None:
        return -1
    if not PyLong_CheckExact(partition):
        return -2
    number = PyLong_AsLongLongAndOverflow(partition, &overflow)
    return -2 if overflow or number < 0 else number


cdef class Receipt:
    cdef readonly object topic, partition
    cdef readonly type place_type
    cdef public object error
    cdef public bint is_settled
    cdef public int64_t base_offset, log_append_time_ms

    def __init__(self, topic, partition, place_type):
        if not issubclass(place_type, tuple):
            raise TypeError(f"{place_type!r} is no kind of tuple")
        self.topic = topic
        self.partition = partition
        self.place_type = place_type
        self.is_settled = False
        self.base_offset = self.log_append_time_ms = -1

    def place(self, index, timestamp_ms):
        return place_in(self, index, timestamp_ms)


cdef inline object place_in(Receipt receipt, int64_t index, int64_t timestamp_ms):
    return _new(receipt.place_type, (
        receipt.topic,
        receipt.partition,
        receipt.base_offset + index if receipt.base_offset >= 0 else receipt.base_offset,
        receipt.log_append_time_ms if receipt.log_append_time_ms >= 0 else timestamp_ms,
    ))


cdef class Claim:
    """Not looked at by the garbage collector until it is completed: there may be millions, and what
    they refer to does not refer to them.
    """

    cdef readonly Receipt receipt
    cdef readonly object whole
    cdef readonly int64_t index, timestamp_ms
    cdef object __weakref__

    @classmethod
    def __class_getitem__(cls, item):
        return cls

    def __init__(self, receipt, index, timestamp_ms):
        self.receipt = receipt
        self.index = index
        self.timestamp_ms = timestamp_ms

    def place(self):
        cdef Receipt receipt = self.receipt
        if not receipt.is_settled or receipt.error is not None:
            return None
        return place_in(receipt, self.index, self.timestamp_ms)

    def complete(self, whole):
        self.whole = whole
        if not PyObject_GC_IsTracked(self):
            PyObject_GC_Track(<void*>self)


cdef class Stuck:
    cdef public int64_t partition, left_bytes

    def __init__(self, partition, left_bytes):
        self.partition = partition
        self.left_bytes = left_bytes


cdef class Places:
    cdef readonly list receipts
    cdef int64_t* _codes
    cdef Py_ssize_t _size, _room

    def __cinit__(self):
        self.receipts = []
        self._codes = NULL
        self._size = self._room = 0

    @classmethod
    def __class_getitem__(cls, item):
        return cls

    def __dealloc__(self):
        PyMem_Free(self._codes)

    def __len__(self):
        return self._size

    def place(self, number):
        cdef Py_ssize_t at = number
        if not 0 <= at < self._size:
            raise IndexError(f"there is no record {number} of {self._size}")
        cdef int64_t code = self._codes[at]
        return code >> 32, code & 0xFFFFFFFF

    def add(self, receipt, index):
        if not self.receipts or self.receipts[len(self.receipts) - 1] is not receipt:
            self.receipts.append(receipt)
        self._add(len(self.receipts) - 1, index)

    cdef int _add(self, int64_t receipt, int64_t index) except -1:
        cdef Py_ssize_t room = self._room
        cdef int64_t* moved
        if self._size == room:
            room = max(64, 2 * room)
            moved = <int64_t*>PyMem_Realloc(self._codes, room * sizeof(int64_t))
            if moved == NULL:
                raise MemoryError
            self._codes, self._room = moved, room
        self._codes[self._size] = receipt << 32 | index
        self._size += 1
        return 0


cdef class OpenBatch:
    """A batch that grows: its records, its receipt, and how large it may become here."""

    cdef RecordsBody body
    cdef Receipt receipt
    cdef Py_ssize_t limit_bytes
    cdef Places places  # Those that it was last entered in,
    cdef int64_t number  # and its receipt's number there.


cdef class OpenTopic:
    """A topic's open batches by partition, and where its records without a key go."""

    cdef list batches
    cdef Stuck stuck


cdef struct Taken:  # A record that is to be taken in.
    int64_t timestamp_ms
    int64_t partition  # -1: wherever it goes.
    Span key, value
    Span headers  # As they stand in a batch.


cdef class Intake:
    cdef readonly int64_t used_bytes, buffer_memory_bytes
    cdef Py_ssize_t _max_record_bytes
    cdef bint _hashes_keys
    cdef type _kind
    cdef dict _topics
    cdef object __weakref__

    @classmethod
    def __class_getitem__(cls, item):
        return cls

    def __init__(self, kind, *, buffer_memory_bytes, max_record_bytes, hashes_keys):
        if not issubclass(kind, Claim):
            raise TypeError(f"{kind!r} is no kind of Claim")
        self._kind = kind
        self.used_bytes = 0
        self.buffer_memory_bytes = buffer_memory_bytes
        self._max_record_bytes = min(max_record_bytes, INT32_MAX)
        self._hashes_keys = hashes_keys
        self._topics = {}

    def charge(self, size_bytes):
        self.used_bytes += <int64_t>size_bytes

    def open(self, topic, partition, *, partition_count, body, receipt, limit_bytes):
        cdef OpenTopic found = self._topics.get(topic)
        cdef OpenBatch batch = OpenBatch()
        if found is None or len(found.batches) != partition_count:
            found = OpenTopic()
            found.batches = [None] * partition_count
            self._topics[topic] = found
        batch.body, batch.receipt, batch.limit_bytes = body, receipt, limit_bytes
        found.batches[partition] = batch

    def stick(self, topic, stuck):
        cdef OpenTopic found = self._topics.get(topic)
        if found is not None:
            found.stuck = stuck

    def close(self, topic, partition):
        cdef OpenTopic found = self._topics.get(topic)
        if found is not None and partition < len(found.batches):
            found.batches[partition] = None

    def clear(self):
        self._topics = {}

    def take(self, topic, value, key, partition):
        cdef OpenTopic found
        cdef OpenBatch batch
        # The collector may run at this allocation, and with it anything else; behind it nothing.
        cdef Claim claim = (<PyTypeObject*>self._kind).tp_new(self._kind, <PyObject*>_NO_ARGUMENTS, NULL)
        PyObject_GC_UnTrack(<void*>claim)
        if not PyUnicode_CheckExact(topic):
            return None
        found = self._topics.get(topic)
        if found is None:
            return None
        if not is_plain(value) or not is_plain(key):
            return None
        cdef Taken record
        record.value, record.key, record.headers = span_of(value), span_of(key), span_of(_NO_HEADERS)
        record.partition = whole_place(partition)
        record.timestamp_ms = wall_ms()
        batch = self._batch_for(found, &record)
        if batch is None:
            return None
        claim.receipt = batch.receipt
        claim.index = batch.body.record_count
        claim.timestamp_ms = record.timestamp_ms
        self._put(found, batch, &record)
        return claim

    def take_many(
        self,
        topic,
        values,
        keys,
        times,
        *,
        partition,
        Py_ssize_t before,
        Places places,
        partitions=None,
        Strings headers=None,
    ):
        cdef OpenTopic found
        cdef OpenBatch batch
        cdef Py_ssize_t at, count = len(values)
        cdef ManyBytes all_values = ManyBytes(values), all_keys = ManyBytes(keys)
        cdef Bytes time_bytes = None if PyLong_CheckExact(times) else Bytes(times)
        cdef Bytes place_bytes = None
        cdef const int64_t* each_time = NULL
        cdef const int32_t* each_place = NULL
        cdef Taken record
        record.headers = span_of(_NO_HEADERS)
        record.partition = whole_place(partition)
        if partition is None and partitions is not None:
            place_bytes = Bytes(partitions)
            each_place = <const int32_t*>place_bytes.start
        if time_bytes is None:
            record.timestamp_ms = times
        else:
            each_time = <const int64_t*>time_bytes.start
        # Here, behind whatever might run anything.
        at = places._size - before
        found = self._topics.get(topic) if PyUnicode_CheckExact(topic) else None
        if (
            found is None
            or not 0 <= at <= count
            or not all_values.has(count)
            or not all_keys.has(count)
            or (headers is not None and headers._count != count)
            or (each_time != NULL and time_bytes.size != 8 * count)
            or (each_place != NULL and place_bytes.size != 4 * count)
        ):
            return at
        while at < count:
            if not all_values.get(at, &record.value) or not all_keys.get(at, &record.key):
                return at
            if headers is not None and not headers.get(at, &record.headers):
                return at
            if each_time != NULL:
                record.timestamp_ms = each_time[at]
            if each_place != NULL:
                record.partition = each_place[at]
            batch = self._batch_for(found, &record)
            if batch is None:
                return at
            if batch.places is not places:
                batch.number = len(places.receipts)
                places.receipts.append(batch.receipt)
                batch.places = places
                # Letting go of the former places may have run anything, here and in other threads, and
                # so may letting go of these: look again at everything.
                batch = None
                found = None
                found = self._topics.get(topic)
                if found is None or not all_values.has(count) or not all_keys.has(count):
                    return at
                continue
            places._add(batch.number, batch.body.record_count)
            self._put(found, batch, &record)
            at += 1
        return at

    cdef inline OpenBatch _batch_for(self, OpenTopic found, const Taken* record):
        """The batch that takes the record now; None where more is to be done about it."""
        cdef Py_ssize_t bound = _BOUND_BYTES
        cdef Py_ssize_t place, count = len(found.batches)
        cdef OpenBatch batch
        if record.timestamp_ms < 0:
            return None
        if record.value.size > 0:
            bound += record.value.size
        if record.key.size > 0:
            bound += record.key.size
        if record.headers.size > 1:
            bound += record.headers.size
        if record.headers.size < 0 or bound + _HEADER_BYTES > self._max_record_bytes:
            return None
        if record.partition != -1:
            if not 0 <= record.partition < count:
                return None
            place = record.partition
        elif not self._hashes_keys:
            return None
        elif record.key.size >= 0:
            place = (murmur2(record.key.start, record.key.size) & 0x7FFFFFFF) % count
        elif found.stuck is not None and found.stuck.left_bytes > 0 and found.stuck.partition < count:
            place = found.stuck.partition
        else:
            return None
        batch = <OpenBatch>PyList_GET_ITEM(found.batches, place)
        if (
            batch is None
            or _HEADER_BYTES + batch.body._size + bound > batch.limit_bytes
            or self.used_bytes + bound > self.buffer_memory_bytes
        ):
            return None
        return batch

    cdef inline int _put(self, OpenTopic found, OpenBatch batch, const Taken* record) except -1:
        cdef Py_ssize_t grown = batch.body._write(
            record.timestamp_ms, record.key, record.value, record.headers
        )
        self.used_bytes += grown
        if record.key.size < 0 and record.partition == -1:
            found.stuck.left_bytes -= grown
        return 0
