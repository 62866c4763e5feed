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


cdef inline bint of_length(list data, Py_ssize_t count) noexcept:
    return data is None or PyList_GET_SIZE(data) == count


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


def byte_strings(column, Py_ssize_t first, Py_ssize_t count):
    cdef list strings = _byte_strings(column, first, count)
    if strings is None:
        return reference.byte_strings(column, first, count)
    return strings


cdef list _byte_strings(object column, Py_ssize_t first, Py_ssize_t count):
    """The strings, or None where they are not all there."""
    cdef Py_buffer offsets, data, validity
    cdef bint has_validity = column.validity is not None
    PyObject_GetBuffer(column.offsets, &offsets, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(column.data, &data, PyBUF_SIMPLE)
        try:
            if not has_validity:
                return _strings_in(&offsets, &data, NULL, first, count)
            PyObject_GetBuffer(column.validity, &validity, PyBUF_SIMPLE)
            try:
                return _strings_in(&offsets, &data, &validity, first, count)
            finally:
                PyBuffer_Release(&validity)
        finally:
            PyBuffer_Release(&data)
    finally:
        PyBuffer_Release(&offsets)


cdef list _strings_in(Py_buffer* offsets, Py_buffer* data, Py_buffer* validity, Py_ssize_t first, Py_ssize_t count):
    cdef const int32_t* ends = <const int32_t*>offsets.buf
    cdef const uint8_t* bits = NULL
    cdef list strings = []
    cdef Py_ssize_t at
    if first < 0 or count < 0 or first > offsets.len // 4 - 1 - count:
        return None
    if validity != NULL:
        if (first + count + 7) // 8 > validity.len:
            return None
        bits = <const uint8_t*>validity.buf
    for at in range(first, first + count):
        if not 0 <= ends[at] <= ends[at + 1] <= data.len:
            return None
        if bits != NULL and not bits[at >> 3] >> (at & 7) & 1:
            strings.append(None)
        else:
            strings.append(PyBytes_FromStringAndSize(<const char*>data.buf + ends[at], ends[at + 1] - ends[at]))
    return strings


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
        batch = self._batch_for(found, value, key, partition)
        if batch is None:
            return None
        claim.receipt = batch.receipt
        claim.index = batch.body.record_count
        claim.timestamp_ms = wall_ms()
        self._put(found, batch, claim.timestamp_ms, value, key, partition)
        return claim

    def take_many(
        self, topic, list values, list keys, times, *, partition, Py_ssize_t before, Places places
    ):
        cdef OpenTopic found = self._topics.get(topic) if PyUnicode_CheckExact(topic) else None
        cdef OpenBatch batch
        cdef Py_ssize_t at = places._size - before, count = len(values)
        cdef object value, key = None
        cdef list each_time = times if type(times) is list else None
        cdef int64_t timestamp_ms = 0 if each_time is not None else times
        if found is None or not 0 <= at <= count or not of_length(keys, count) or not of_length(each_time, count):
            return at
        while at < count:
            value = values[at]
            if each_time is not None:
                timestamp_ms = each_time[at]
            if keys is not None:
                key = keys[at]
            batch = self._batch_for(found, value, key, partition)
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
                if (
                    found is None
                    or not of_length(values, count)
                    or not of_length(keys, count)
                    or not of_length(each_time, count)
                ):
                    return at
                continue
            places._add(batch.number, batch.body.record_count)
            self._put(found, batch, timestamp_ms, value, key, partition)
            at += 1
        return at

    cdef inline OpenBatch _batch_for(self, OpenTopic found, object value, object key, object partition):
        """The batch that takes the record now; None where more is to be done about it."""
        cdef Py_ssize_t bound = _BOUND_BYTES
        cdef Py_ssize_t place, count = len(found.batches)
        cdef OpenBatch batch
        if not is_plain(value) or not is_plain(key):
            return None
        if value is not None:
            bound += PyBytes_GET_SIZE(value)
        if key is not None:
            bound += PyBytes_GET_SIZE(key)
        if bound + _HEADER_BYTES > self._max_record_bytes:
            return None
        if partition is not None:
            if not PyLong_CheckExact(partition) or not 0 <= partition < count:
                return None
            place = partition
        elif not self._hashes_keys:
            return None
        elif key is not None:
            place = (murmur2(<const uint8_t*>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)) & 0x7FFFFFFF) % count
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

    cdef inline int _put(
        self, OpenTopic found, OpenBatch batch, int64_t timestamp_ms, object value, object key, object partition
    ) except -1:
        cdef Py_ssize_t grown = batch.body._write(timestamp_ms, key, value, b"\x00")
        self.used_bytes += grown
        if key is None and partition is None:
            found.stuck.left_bytes -= grown
        return 0
