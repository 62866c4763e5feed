# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: embedsignature=False, always_allow_keywords=False
"""Records to bytes and back, compiled: what ``penstock.wire.reference`` does, as it does it.

What is malformed is left to the reference, which says what is wrong with it. So nothing here raises
an error of its own about bytes, and no text of one stands here twice. Nothing is read past what was
given: every step compares with where the record, or the data, end. ``make fuzz-codec`` runs this
under an address sanitiser.

Offsets in columns are int32, which is enough: no buffer here has more than 2 GB.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_CheckExact, PyLong_AsLongLongAndOverflow
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE, PyTuple_New, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_CheckExact, PyUnicode_DecodeUTF8
from libc.stdint cimport INT32_MAX, INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from operator import index

from penstock.wire import reference
from penstock.wire.batch import HEADER_BYTES
from penstock.wire.columns import BytesColumn, Columns, HeadersColumn
from penstock.wire.record import Record, RecordData
from penstock.wire.varint import encode_varint

cdef extern from "Python.h":
    const int PY_VERSION_HEX
    int PyObject_GC_IsTracked(object op)
    void PyObject_GC_Track(void* op)
    void PyObject_GC_UnTrack(void* op)
    object PyType_GenericAlloc(PyTypeObject* type, Py_ssize_t items)

cdef object _new = tuple.__new__
cdef type _Record = Record
cdef type _RecordData = RecordData
cdef Py_ssize_t _HEADER_BYTES = HEADER_BYTES
cdef Py_ssize_t _MIN_RECORD_BYTES = reference.MIN_RECORD_BYTES


# --- bytes -------------------------------------------------------------------------------------

cdef struct Span:
    const uint8_t* start
    int64_t size  # -1: null.


cdef class Bytes:
    """What a buffer holds, for as long as this is there."""

    cdef Py_buffer _buffer
    cdef const uint8_t* start
    cdef Py_ssize_t size

    def __cinit__(self, data):
        PyObject_GetBuffer(data, &self._buffer, PyBUF_SIMPLE)
        self.start = <const uint8_t*>self._buffer.buf
        self.size = self._buffer.len

    def __dealloc__(self):
        PyBuffer_Release(&self._buffer)


cdef inline Span span_of(object data) noexcept:
    """Of None, or of exactly bytes, for as long as those are there."""
    cdef Span span
    span.start, span.size = NULL, -1
    if data is not None:
        span.start, span.size = <const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data)
    return span


cdef inline object as_object(Span span):
    if span.size < 0:
        return None
    return PyBytes_FromStringAndSize(<const char*>span.start, span.size)


# --- writing -------------------------------------------------------------------------------------

cdef inline uint64_t zigzag(int64_t value) noexcept nogil:
    return (<uint64_t>value << 1) ^ <uint64_t>(value >> 63)


cdef inline int size_of(uint64_t unsigned) noexcept nogil:
    cdef int size = 1
    while unsigned > 0x7F:
        unsigned >>= 7
        size += 1
    return size


cdef inline uint8_t* write_varint(uint8_t* at, uint64_t unsigned) noexcept nogil:
    while unsigned > 0x7F:
        at[0] = <uint8_t>((unsigned & 0x7F) | 0x80)
        at += 1
        unsigned >>= 7
    at[0] = <uint8_t>unsigned
    return at + 1


cdef inline uint8_t* write_bytes(uint8_t* at, Span data) noexcept nogil:
    """A null, or bytes with their length before them."""
    if data.size < 0:
        at[0] = 1
        return at + 1
    at = write_varint(at, zigzag(data.size))
    memcpy(at, data.start, data.size)
    return at + data.size


cdef inline object as_bytes(object data):
    """None or bytes. Raises TypeError for what is neither, nor a buffer of bytes."""
    if data is None or PyBytes_CheckExact(data):
        return data
    return bytes(memoryview(data))


cdef inline Py_ssize_t bytes_size(Span data) noexcept nogil:
    """The size of a null (one byte) or of bytes with their length."""
    return 1 if data.size < 0 else size_of(zigzag(data.size)) + data.size


# Buffers that records were gathered in, kept for those who gather next: memory that was touched
# before costs nothing to touch again. Guarded, as all here, by Python's global lock.
cdef enum:
    KEPT_BUFFERS = 24
cdef Py_ssize_t _LEAST_KEPT_BYTES = 16 * 1024
cdef Py_ssize_t _LARGEST_KEPT_BYTES = 640 * 1024
cdef uint8_t* _kept[KEPT_BUFFERS]
cdef Py_ssize_t _kept_bytes[KEPT_BUFFERS]
cdef int _kept_count = 0


cdef class RecordsBody:
    """The buffer begins with room for the header of the batch, so that it can be sent from there."""

    cdef uint8_t* _buffer
    cdef Py_ssize_t _size, _room  # Of the records: without the header's.
    cdef int _exports
    cdef readonly int64_t record_count, base_timestamp_ms, max_timestamp_ms

    def __cinit__(self):
        self._buffer = NULL
        self._size = self._room = 0
        self._exports = 0
        self.record_count = 0
        self.base_timestamp_ms = self.max_timestamp_ms = -1

    def __dealloc__(self):
        global _kept_count
        cdef Py_ssize_t size = self._room + _HEADER_BYTES
        if _LEAST_KEPT_BYTES <= size <= _LARGEST_KEPT_BYTES and _kept_count < KEPT_BUFFERS:
            _kept[_kept_count] = self._buffer
            _kept_bytes[_kept_count] = size
            _kept_count += 1
        else:
            PyMem_Free(self._buffer)

    @property
    def size_bytes(self):
        return _HEADER_BYTES + self._size

    def body(self):
        return b"" if self._buffer == NULL else memoryview(self)[_HEADER_BYTES:]

    def behind(self, bytes header):
        if PyBytes_GET_SIZE(header) != _HEADER_BYTES:
            raise ValueError(f"a header of {len(header)} bytes instead of {_HEADER_BYTES}")
        self._make_room(0)
        memcpy(self._buffer, PyBytes_AS_STRING(header), _HEADER_BYTES)
        return memoryview(self)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if self._buffer == NULL:
            raise BufferError("there is nothing in a batch to which nothing was added")
        PyBuffer_FillInfo(buffer, self, self._buffer, _HEADER_BYTES + self._size, True, flags)
        self._exports += 1

    def __releasebuffer__(self, Py_buffer* buffer):
        self._exports -= 1

    def append(self, timestamp_ms, key, value, headers=()):
        return self._append(timestamp_ms, key, value, headers)

    def extend(self, records):
        for record in records:
            if type(record) is _RecordData:
                self._append(
                    <object>PyTuple_GET_ITEM(record, 0),
                    <object>PyTuple_GET_ITEM(record, 1),
                    <object>PyTuple_GET_ITEM(record, 2),
                    <object>PyTuple_GET_ITEM(record, 3),
                )
            else:
                self._append(record.timestamp_ms, record.key, record.value, record.headers)

    cdef Py_ssize_t _append(self, object timestamp, object key, object value, object headers) except -1:
        cdef int64_t timestamp_ms
        try:
            timestamp_ms = index(timestamp)  # Refuses by TypeError what is no whole number.
        except OverflowError:
            timestamp_ms = -2
        if timestamp_ms < -1:
            raise ValueError(f"timestamp {timestamp} ms is out of range")
        key, value = as_bytes(key), as_bytes(value)
        cdef bytes encoded_headers = reference.encode_headers(headers) if headers else b"\x00"
        if timestamp_ms == INT64_MAX and self.record_count and self.base_timestamp_ms < 0:
            encode_varint(timestamp - self.base_timestamp_ms)  # Refuses by ValueError: 65 bits.
        return self._write(timestamp_ms, span_of(key), span_of(value), span_of(encoded_headers))

    cdef Py_ssize_t _write(self, int64_t timestamp_ms, Span key, Span value, Span headers) except -1:
        """Add what was checked. Runs no Python code, so nothing else runs in its midst."""
        cdef int64_t base_ms = self.base_timestamp_ms if self.record_count else timestamp_ms
        cdef uint64_t delta = zigzag(timestamp_ms - base_ms)
        cdef uint64_t offset = zigzag(self.record_count)
        cdef Py_ssize_t size = (
            1 + size_of(delta) + size_of(offset) + bytes_size(key) + bytes_size(value) + headers.size
        )
        cdef Py_ssize_t grown = size_of(zigzag(size)) + size
        self._make_room(grown)
        cdef uint8_t* at = write_varint(self._buffer + _HEADER_BYTES + self._size, zigzag(size))
        at[0] = 0
        at = write_varint(at + 1, delta)
        at = write_varint(at, offset)
        at = write_bytes(at, key)
        at = write_bytes(at, value)
        memcpy(at, headers.start, headers.size)
        self._size += grown
        self.base_timestamp_ms = base_ms
        if not self.record_count or timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = timestamp_ms
        self.record_count += 1
        return grown

    cdef int _make_room(self, Py_ssize_t more) except -1:
        global _kept_count
        cdef Py_ssize_t room
        cdef uint8_t* moved
        if self._exports:
            raise BufferError("a batch that is in use takes no more records, and no other header")
        if self._buffer != NULL and self._size + more <= self._room:
            return 0
        if self._buffer == NULL and _kept_count and more <= _kept_bytes[_kept_count - 1] - _HEADER_BYTES:
            _kept_count -= 1
            self._buffer = _kept[_kept_count]
            self._room = _kept_bytes[_kept_count] - _HEADER_BYTES
            return 0
        room = max(512, 2 * self._room, self._size + more)
        moved = <uint8_t*>PyMem_Realloc(self._buffer, _HEADER_BYTES + room)
        if moved == NULL:
            raise MemoryError
        self._buffer, self._room = moved, room
        return 0


# --- taking in ----------------------------------------------------------------------------------

include "_intake.pxi"


# --- reading -------------------------------------------------------------------------------------

cdef struct Parsed:  # One record. ``headers`` are the bytes after their count.
    int64_t delta, delta_ms, header_count
    Span key, value
    const uint8_t* headers
    const uint8_t* end


cdef inline const uint8_t* read_varint(
    const uint8_t* at, const uint8_t* end, int64_t* out
) noexcept nogil:
    """The position after the number; NULL where it is cut off or has more than 64 bits."""
    cdef uint64_t value = 0
    cdef int shift = 0
    cdef uint8_t byte
    while at < end:
        byte = at[0]
        at += 1
        if shift == 63 and byte > 1:
            return NULL
        value |= <uint64_t>(byte & 0x7F) << shift
        if byte < 0x80:
            out[0] = <int64_t>((value >> 1) ^ (0 - (value & 1)))
            return at
        shift += 7
        if shift > 63:
            return NULL
    return NULL


cdef inline const uint8_t* read_span(
    const uint8_t* at, const uint8_t* end, Span* out
) noexcept nogil:
    """The position after a nullable byte string; NULL where it goes beyond ``end``."""
    at = read_varint(at, end, &out.size)
    if at == NULL or out.size < -1 or out.size > end - at:
        return NULL
    out.start = at
    return at if out.size < 0 else at + out.size


cdef inline const uint8_t* read_record(
    const uint8_t* at, const uint8_t* end, Parsed* out
) noexcept nogil:
    """The position after the record; NULL where it is malformed, but for its headers."""
    cdef int64_t length
    at = read_varint(at, end, &length)
    if at == NULL or length < _MIN_RECORD_BYTES - 1 or length > end - at:
        return NULL
    end = at + length
    at = read_varint(at + 1, end, &out.delta_ms)
    if at == NULL:
        return NULL
    at = read_varint(at, end, &out.delta)
    if at == NULL:
        return NULL
    at = read_span(at, end, &out.key)
    if at == NULL:
        return NULL
    at = read_span(at, end, &out.value)
    if at == NULL:
        return NULL
    at = read_varint(at, end, &out.header_count)
    if at == NULL or out.header_count < 0 or out.header_count > (end - at) // 2:
        return NULL
    if out.header_count == 0 and at != end:
        return NULL
    out.headers, out.end = at, end
    return end


cdef inline bint add(int64_t base, int64_t delta, int64_t* out) noexcept nogil:
    """Whether the sum is from -1 to the largest there is. A base below -1 is left to Python."""
    if base < -1 or delta < -1 - base or delta > INT64_MAX - (base if base > 0 else 0):
        return False
    out[0] = base + delta
    return True


cdef object read_headers(Parsed* record):
    """A tuple of names and values; None where they are malformed."""
    cdef const uint8_t* at = record.headers
    cdef Span name, value
    cdef int64_t place
    cdef tuple headers = PyTuple_New(record.header_count)
    for place in range(record.header_count):
        header = None
        at = read_span(at, record.end, &name)
        if at != NULL and name.size >= 0:
            at = read_span(at, record.end, &value)
            if at != NULL:
                try:
                    header = (
                        PyUnicode_DecodeUTF8(<const char*>name.start, name.size, NULL),
                        as_object(value),
                    )
                except UnicodeDecodeError:
                    header = None
        Py_INCREF(header)
        PyTuple_SET_ITEM(headers, place, header)
        if header is None:
            while place + 1 < record.header_count:
                place += 1
                Py_INCREF(None)
                PyTuple_SET_ITEM(headers, place, None)
            return None
    return headers if at == record.end else None


cdef inline void put(object record, Py_ssize_t place, object field) noexcept:
    Py_INCREF(field)
    PyTuple_SET_ITEM(record, place, field)


cdef inline object new_record(
    type kind, tuple before, object offset, object timestamp_ms, Parsed* parsed, tuple headers, tuple after
):
    """A record. It is made of what can be in no cycle, so the collector need not look at it."""
    cdef object record, key, value
    cdef Py_ssize_t first = PyTuple_GET_SIZE(before), more = PyTuple_GET_SIZE(after), place
    if PY_VERSION_HEX >= 0x030E0000:
        # A tuple of 3.14 keeps its hash, which only its own constructor sets to unknown.
        key, value = as_object(parsed.key), as_object(parsed.value)
        return _new(kind, (*before, offset, timestamp_ms, key, value, headers, *after))
    record = PyType_GenericAlloc(<PyTypeObject*>kind, first + 5 + more)
    for place in range(first):
        put(record, place, <object>PyTuple_GET_ITEM(before, place))
    put(record, first, offset)
    put(record, first + 1, timestamp_ms)
    put(record, first + 2, as_object(parsed.key))
    put(record, first + 3, as_object(parsed.value))
    put(record, first + 4, headers)
    for place in range(more):
        put(record, first + 5 + place, <object>PyTuple_GET_ITEM(after, place))
    PyObject_GC_UnTrack(<void*>record)
    return record


def parse_records(data, bounds):
    cdef list records = _records(Bytes(data), bounds, -1, _Record, (), ())
    if records is None:
        return reference.parse_records(data, bounds)
    return records


def parse_records_as(data, bounds, least_offset, kind, before, after):
    cdef list records = None
    before, after = tuple(before), tuple(after)  # Exactly tuples, whatever kind they were of.
    if isinstance(kind, type) and issubclass(kind, tuple) and -1 <= least_offset <= INT64_MAX:
        records = _records(Bytes(data), bounds, least_offset, kind, before, after)
    if records is None:
        return reference.parse_records_as(data, bounds, least_offset, kind, before, after)
    return records


cdef list _records(
    Bytes data, object bounds, int64_t least_offset, type kind, tuple before, tuple after
):
    """The records from an offset on, or None where something is malformed, before it too."""
    cdef int64_t record_count, base_offset, last_delta, base_ms, scale
    record_count, base_offset, last_delta, base_ms, scale = bounds
    cdef const uint8_t* at = data.start
    cdef const uint8_t* end = at + data.size
    cdef Parsed parsed
    cdef int64_t least_delta = 0, offset, timestamp_ms, last_ms = -1, i
    cdef object time = -1
    cdef list records = []
    cdef tuple empty = (), headers
    for i in range(record_count):
        at = read_record(at, end, &parsed)
        if at == NULL or not least_delta <= parsed.delta <= last_delta:
            return None
        if not add(base_ms, parsed.delta_ms * scale, &timestamp_ms):
            return None
        if not add(base_offset, parsed.delta, &offset):
            return None
        least_delta = parsed.delta + 1
        headers = empty
        if parsed.header_count:
            headers = read_headers(&parsed)
            if headers is None:
                return None
        if offset < least_offset:
            continue
        if timestamp_ms != last_ms:  # What is sent together often has one time.
            time, last_ms = timestamp_ms, timestamp_ms
        records.append(new_record(kind, before, offset, time, &parsed, headers, after))
    return records if at == end else None


# --- columns -------------------------------------------------------------------------------------

cdef class ByteStrings:
    """A column of byte strings in the making. Room is made before they are put."""

    cdef bytearray _validity, _offsets, _data
    cdef uint8_t* validity
    cdef int32_t* offsets
    cdef uint8_t* data
    cdef int64_t count, null_count, _room
    cdef Py_ssize_t size, _data_room

    def __cinit__(self):
        self._validity = PyByteArray_FromStringAndSize(NULL, 0)
        self._offsets = PyByteArray_FromStringAndSize(NULL, 4)
        self._data = PyByteArray_FromStringAndSize(NULL, 0)
        self.count = self.null_count = self._room = 0
        self.size = self._data_room = 0
        self.reserve(0, 0)
        self.offsets[0] = 0

    cdef int reserve(self, int64_t count, Py_ssize_t size) except -1:
        """Make room for so many more strings, of so many bytes together."""
        cdef int64_t had = (self._room + 7) // 8
        if self.count + count > self._room:
            self._room = max(self.count + count, 2 * self._room)
            PyByteArray_Resize(self._validity, (self._room + 7) // 8)
            PyByteArray_Resize(self._offsets, 4 * (self._room + 1))
        if self.size + size > self._data_room:
            self._data_room = max(self.size + size, 2 * self._data_room)
            PyByteArray_Resize(self._data, self._data_room)
        self.validity = <uint8_t*>PyByteArray_AS_STRING(self._validity)
        self.offsets = <int32_t*>PyByteArray_AS_STRING(self._offsets)
        self.data = <uint8_t*>PyByteArray_AS_STRING(self._data)
        memset(self.validity + had, 0, (self._room + 7) // 8 - had)
        return 0

    cdef inline void put(self, Span span) noexcept:
        """The caller has seen to it that there is room."""
        if span.size < 0:
            self.null_count += 1
        else:
            self.validity[self.count >> 3] |= <uint8_t>(1 << (self.count & 7))
            memcpy(self.data + self.size, span.start, span.size)
            self.size += span.size
        self.count += 1
        self.offsets[self.count] = <int32_t>self.size

    cdef void cut(self, int64_t count) noexcept:
        """Only the first so many are left."""
        while self.count > count:
            self.count -= 1
            if self.validity[self.count >> 3] >> (self.count & 7) & 1:
                self.validity[self.count >> 3] &= <uint8_t>(~(1 << (self.count & 7)))
            else:
                self.null_count -= 1
        self.size = self.offsets[count]

    cdef object column(self):
        PyByteArray_Resize(self._data, self.size)
        PyByteArray_Resize(self._offsets, 4 * (self.count + 1))
        PyByteArray_Resize(self._validity, (self.count + 7) // 8)
        return BytesColumn(
            self._validity if self.null_count else None, self.null_count, self._offsets, self._data
        )


cdef class ColumnsBuilder:
    cdef bytearray _offsets, _times, _header_offsets
    cdef ByteStrings keys, values, names, header_values
    cdef int64_t _count, _room
    cdef Py_ssize_t _size
    cdef bint _built

    def __cinit__(self):
        self._offsets = PyByteArray_FromStringAndSize(NULL, 0)
        self._times = PyByteArray_FromStringAndSize(NULL, 0)
        self._header_offsets = None
        self.keys, self.values = ByteStrings(), ByteStrings()
        self._count = self._room = 0
        self._size = 0
        self._built = False

    @property
    def record_count(self):
        return self._count

    @property
    def last_offset(self):
        if not self._count:
            return -1
        return (<int64_t*>PyByteArray_AS_STRING(self._offsets))[self._count - 1]

    def add(self, data, bounds, least_offset, most):
        cdef Bytes held = Bytes(data)
        cdef int64_t left
        if self._built:
            raise ValueError("the columns were built")
        if held.size > INT32_MAX - self._size:
            raise OverflowError("columns hold no more than 2 GB")
        left = self._add(held, bounds, least_offset, most)
        if left < 0:
            left = self._add_slowly(reference.parse_records(data, bounds), least_offset, most)
        self._size += held.size
        return left

    def build(self):
        self._built = True
        PyByteArray_Resize(self._offsets, 8 * self._count)
        PyByteArray_Resize(self._times, 8 * self._count)
        headers = None
        if self._header_offsets is not None and self.names.count:
            PyByteArray_Resize(self._header_offsets, 4 * (self._count + 1))
            headers = HeadersColumn(
                self._header_offsets, self.names.column(), self.header_values.column()
            )
        return Columns(
            self._count, self._offsets, self._times, self.keys.column(), self.values.column(), headers
        )

    cdef int _reserve(self, int64_t count, Py_ssize_t size) except -1:
        self.keys.reserve(count, size)
        self.values.reserve(count, size)
        if self._count + count > self._room:
            self._room = max(self._count + count, 2 * self._room)
            PyByteArray_Resize(self._offsets, 8 * self._room)
            PyByteArray_Resize(self._times, 8 * self._room)
            if self._header_offsets is not None:
                PyByteArray_Resize(self._header_offsets, 4 * (self._room + 1))
        if self._header_offsets is not None:
            self._reserve_headers(size)
        return 0

    cdef int _reserve_headers(self, Py_ssize_t size) except -1:
        if self._header_offsets is None:
            self._header_offsets = PyByteArray_FromStringAndSize(NULL, 4 * (self._room + 1))
            memset(PyByteArray_AS_STRING(self._header_offsets), 0, 4 * (self._room + 1))
            self.names, self.header_values = ByteStrings(), ByteStrings()
        self.names.reserve(size // 2, size)  # Each has two bytes at least.
        self.header_values.reserve(size // 2, size)
        return 0

    cdef void _cut(self, int64_t count) noexcept:
        """Only the first so many records are left."""
        self._count = count
        self.keys.cut(count)
        self.values.cut(count)
        if self._header_offsets is not None:
            count = (<int32_t*>PyByteArray_AS_STRING(self._header_offsets))[count]
            self.names.cut(count)
            self.header_values.cut(count)

    cdef int64_t _add(self, Bytes data, object bounds, int64_t least_offset, int64_t most) except -2:
        """How many records there was no room for; -1 where something is malformed."""
        cdef int64_t record_count, base_offset, last_delta, base_ms, scale
        record_count, base_offset, last_delta, base_ms, scale = bounds
        cdef Py_ssize_t size = data.size
        if not 0 <= record_count <= size // _MIN_RECORD_BYTES:
            return -1
        self._reserve(record_count, size)
        cdef const uint8_t* at = data.start
        cdef const uint8_t* end = at + size
        cdef int64_t* offsets = <int64_t*>PyByteArray_AS_STRING(self._offsets)
        cdef int64_t* times = <int64_t*>PyByteArray_AS_STRING(self._times)
        cdef int32_t* header_offsets = NULL
        if self._header_offsets is not None:
            header_offsets = <int32_t*>PyByteArray_AS_STRING(self._header_offsets)
        cdef Parsed parsed
        cdef int64_t least_delta = 0, left = 0, had = self._count, i, offset, timestamp_ms
        for i in range(record_count):
            at = read_record(at, end, &parsed)
            if (
                at == NULL
                or not least_delta <= parsed.delta <= last_delta
                or not add(base_ms, parsed.delta_ms * scale, &timestamp_ms)
                or not add(base_offset, parsed.delta, &offset)
            ):
                self._cut(had)
                return -1
            least_delta = parsed.delta + 1
            if parsed.header_count:
                if header_offsets == NULL:
                    self._reserve_headers(size)
                    header_offsets = <int32_t*>PyByteArray_AS_STRING(self._header_offsets)
                if not self._put_headers(&parsed):
                    self._cut(had)
                    return -1
            if offset < least_offset or self._count - had >= most:
                left += offset >= least_offset
                if parsed.header_count:
                    self.names.cut(header_offsets[self._count])
                    self.header_values.cut(header_offsets[self._count])
                continue
            offsets[self._count] = offset
            times[self._count] = timestamp_ms
            self.keys.put(parsed.key)
            self.values.put(parsed.value)
            self._count += 1
            if header_offsets != NULL:
                header_offsets[self._count] = <int32_t>self.names.count
        if at != end:
            self._cut(had)
            return -1
        return left

    cdef bint _put_headers(self, Parsed* record) except -1:
        """Whether they are sound."""
        cdef const uint8_t* at = record.headers
        cdef Span name, value
        for _ in range(record.header_count):
            at = read_span(at, record.end, &name)
            if at == NULL or name.size < 0:
                return False
            at = read_span(at, record.end, &value)
            if at == NULL:
                return False
            try:
                PyUnicode_DecodeUTF8(<const char*>name.start, name.size, NULL)
            except UnicodeDecodeError:
                return False
            self.names.put(name)
            self.header_values.put(value)
        return at == record.end

    cdef int64_t _add_slowly(self, list records, int64_t least_offset, int64_t most) except -2:
        """Records whose numbers only the reference can add up."""
        chosen = [record for record in records if record.offset >= least_offset]
        for record in chosen[:most]:
            body = reference.RecordsBody()
            body.append(record.timestamp_ms, record.key, record.value, record.headers)
            again = (1, max(record.offset, 0), 0, record.timestamp_ms, 1)
            if self._add(Bytes(body.body()), again, -1, 1) != 0:
                raise AssertionError("what was read cannot be written")
            (<int64_t*>PyByteArray_AS_STRING(self._offsets))[self._count - 1] = record.offset
        return len(chosen) - min(len(chosen), most)


def parse_columns(data, bounds):
    cdef ColumnsBuilder columns = ColumnsBuilder()
    cdef Bytes held = Bytes(data)
    if held.size > INT32_MAX or columns._add(held, bounds, INT64_MIN, INT64_MAX) != 0:
        return reference.parse_columns(data, bounds)
    return columns.build()
