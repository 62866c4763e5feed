/* Stands between a node and the C library: its disk may fail, fill up, be slow or forget, and its wall
 * clock be another one. Loaded by LD_PRELOAD; preload.py builds it and says what is to happen, in a page of memory that both have
 * mapped.
 *
 * Only files under one directory are touched. Where nothing is to happen a call costs a look at the
 * descriptor's entry in a table.
 *
 * What is written and not synced is noted in a journal, in the order of events: before each change
 * what it changes, after it that it is done, and when a sync begins and ends. unsynced.py takes back
 * from that what a loss of power would have taken.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    uint64_t delay_us;
    uint32_t write_errno;
    uint32_t sync_errno;
    uint32_t journal; /* The number of the journal to write; 0: none. */
    uint32_t strobe_us; /* How long the clock is off, and how long it is right after that; 0: off. */
    int64_t clock_us; /* By how much it is off. */
};

/* What a record is about; unsynced.py has the same numbers. */
enum { WRITE = 1, CUT, MADE, GONE, RENAMED, DONE, SYNC, SYNCED, DURABLE };

struct record {
    uint32_t kind;
    uint32_t names_bytes; /* Names follow the record, each with a zero behind it, then content. */
    uint64_t id;
    uint64_t inode; /* The file's, or the directory's. */
    uint64_t other; /* The directory that is renamed into; what DONE and SYNCED say. */
    uint64_t offset;
    uint64_t length;
    uint64_t old_size;
    uint64_t content_bytes;
};

#define DESCRIPTORS 65536
#define FILE_ENTRY 1
#define DIRECTORY_ENTRY 2
#define DURABLE_ENTRY 4 /* Opened with O_SYNC or O_DSYNC. */

static volatile struct control *control;
static char root[PATH_MAX], journal_directory[PATH_MAX];
static size_t root_length;
static uint8_t entries[DESCRIPTORS];
static uint64_t inodes[DESCRIPTORS];
static pthread_mutex_t journal_lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t journal_open_as;
static int journal_fd = -1;
static uint64_t last_id;

#define REAL(name)                                                    \
    __extension__({                                                   \
        if (!real_##name) real_##name = dlsym(RTLD_NEXT, #name);      \
        real_##name;                                                  \
    })
#define DECLARE(type, name, ...) static type (*real_##name)(__VA_ARGS__)

DECLARE(int, open, const char *, int, ...);
DECLARE(int, openat, int, const char *, int, ...);
DECLARE(int, close, int);
DECLARE(ssize_t, write, int, const void *, size_t);
DECLARE(ssize_t, pwrite, int, const void *, size_t, off_t);
DECLARE(ssize_t, writev, int, const struct iovec *, int);
DECLARE(ssize_t, pwritev, int, const struct iovec *, int, off_t);
DECLARE(ssize_t, pwritev2, int, const struct iovec *, int, off_t, int);
DECLARE(int, fsync, int);
DECLARE(int, fdatasync, int);
DECLARE(int, syncfs, int);
DECLARE(int, sync_file_range, int, off_t, off_t, unsigned);
DECLARE(int, ftruncate, int, off_t);
DECLARE(int, fallocate, int, int, off_t, off_t);
DECLARE(int, posix_fallocate, int, off_t, off_t);
DECLARE(int, renameat, int, const char *, int, const char *);
DECLARE(int, unlinkat, int, const char *, int);
DECLARE(int, mkdirat, int, const char *, mode_t);
DECLARE(int, linkat, int, const char *, int, const char *, int);
DECLARE(int, statvfs, const char *, struct statvfs *);
DECLARE(int, fstatvfs, int, struct statvfs *);
DECLARE(int, clock_gettime, clockid_t, struct timespec *);
DECLARE(int, sem_timedwait, sem_t *, const struct timespec *);
DECLARE(long, syscall, long, ...);

/* A fault that is never injected, or a write that nobody knows of, would make a run worth nothing. */
__attribute__((noreturn)) static void die(const char *what, const char *path) {
    fprintf(stderr, "penstock chaos: cannot %s %s: %s\n", what, path, strerror(errno));
    abort();
}

/* --- setting up ------------------------------------------------------------------------------ */

__attribute__((constructor)) static void begin(void) {
    const char *at = getenv("PENSTOCK_CHAOS_CONTROL"), *under = getenv("PENSTOCK_CHAOS_ROOT");
    const char *notes = getenv("PENSTOCK_CHAOS_JOURNAL");
    if (!at || !under || !notes) return;
    snprintf(root, sizeof root, "%s/", under);
    root_length = strlen(root);
    snprintf(journal_directory, sizeof journal_directory, "%s", notes);
    int fd = REAL(open)(at, O_RDWR | O_CLOEXEC);
    if (fd < 0) die("open", at);
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REAL(close)(fd);
    if (mapped == MAP_FAILED) die("map", at);
    control = mapped;
}

static int fail_with(int number) {
    errno = number;
    return -1;
}

static void linger(void) {
    uint64_t us = control->delay_us;
    struct timespec left = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    int kept = errno;
    while (us && nanosleep(&left, &left) && errno == EINTR) continue;
    errno = kept;
}

static int is_full(uint32_t number) { return number == ENOSPC || number == EDQUOT; }

/* Take "." and ".." out of an absolute path, as if no directory in it were a symbolic link. */
static void normalise(char *path) {
    char *to = path;
    for (const char *from = path; *from;) {
        const char *end = strchrnul(from + 1, '/');
        size_t size = end - from;
        if (size == 3 && !strncmp(from, "/..", 3)) {
            while (to > path && *--to != '/') {}
        } else if (size > 1 && !(size == 2 && from[1] == '.')) {
            memmove(to, from, size);
            to += size;
        }
        from = end;
    }
    *to = 0;
}

/* The absolute path of what a call names, into ``path``; whether it is the root or under it. */
static int resolve(int directory, const char *name, char *path) {
    if (!control || !name) return 0;
    if (name[0] == '/') {
        if (strlen(name) >= PATH_MAX) return 0;
        strcpy(path, name);
    } else {
        char link[64];
        if (directory == AT_FDCWD) strcpy(link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t size = readlink(link, path, PATH_MAX - 1);
        if (size <= 0 || size + strlen(name) + 2 > PATH_MAX) return 0;
        path[size] = '/';
        strcpy(path + size + 1, name);
    }
    normalise(path);
    size_t compared = strlen(path) == root_length - 1 ? root_length - 1 : root_length;
    return strncmp(path, root, compared) == 0;
}

/* --- the journal ----------------------------------------------------------------------------- */

static int is_noted(void) { return control && control->journal; }

/* Hold the lock. */
static int open_journal(void) {
    uint32_t wanted = control->journal;
    if (wanted && wanted != journal_open_as) {
        char path[PATH_MAX + 64];
        if (journal_fd >= 0) REAL(close)(journal_fd);
        /* One for each life: what a life that was ended tore is at the end of its own. */
        snprintf(path, sizeof path, "%s/journal-%u-%d", journal_directory, wanted, getpid());
        journal_fd = REAL(open)(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
        journal_open_as = wanted;
        if (journal_fd < 0) die("open", path);
    }
    return wanted ? journal_fd : -1;
}

/* Put a record down, and give its number: 0 where nothing is noted. */
static uint64_t note(struct record record, const char *name, const char *other, void *content) {
    struct iovec parts[4];
    int kept = errno;
    pthread_mutex_lock(&journal_lock);
    int fd = open_journal();
    if (fd >= 0) {
        if (!record.id) {
            /* Other lives of the node have written numbers too: these are larger. */
            struct timespec now;
            if (!last_id) {
                REAL(clock_gettime)(CLOCK_BOOTTIME, &now);
                last_id = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
            }
            record.id = ++last_id;
        }
        record.names_bytes = (name ? strlen(name) + 1 : 0) + (other ? strlen(other) + 1 : 0);
        parts[0] = (struct iovec){&record, sizeof record};
        parts[1] = (struct iovec){(void *)name, name ? strlen(name) + 1 : 0};
        parts[2] = (struct iovec){(void *)other, other ? strlen(other) + 1 : 0};
        parts[3] = (struct iovec){content, record.content_bytes};
        size_t size = sizeof record + record.names_bytes + record.content_bytes;
        if (REAL(writev)(fd, parts, 4) != (ssize_t)size) die("write to", journal_directory);
    }
    pthread_mutex_unlock(&journal_lock);
    errno = kept;
    return fd >= 0 ? record.id : 0;
}

static void note_done(uint64_t id, int succeeded) {
    if (id) note((struct record){.kind = DONE, .id = id, .other = succeeded}, NULL, NULL, NULL);
}

/* A part of a file is about to be changed: what is there now. ``to_end``: all from there on. */
static uint64_t note_change(int kind, int fd, uint64_t inode, off_t offset, size_t length) {
    struct stat now;
    if (!is_noted() || fstat(fd, &now)) return 0;
    struct record record = {.kind = kind, .inode = inode, .offset = offset, .length = length,
                            .old_size = now.st_size};
    off_t end = kind == CUT ? now.st_size : offset + (off_t)length;
    if (end > now.st_size) end = now.st_size;
    void *content = NULL;
    if (end > offset) {
        /* The descriptor may not be for reading. */
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        int reading = REAL(open)(path, O_RDONLY | O_CLOEXEC);
        content = malloc(end - offset);
        off_t at = offset;
        ssize_t got = 1;
        while (content && reading >= 0 && at < end && got > 0) {
            got = pread(reading, (char *)content + (at - offset), end - at, at);
            if (got > 0) at += got;
        }
        if (reading >= 0) REAL(close)(reading);
        record.content_bytes = at - offset;
    }
    uint64_t id = note(record, NULL, NULL, content);
    free(content);
    return id;
}

/* The directory that a path is in, and the name in it. */
static uint64_t parent_of(char *path, const char **name) {
    char *slash = strrchr(path, '/');
    struct stat found;
    *slash = 0;
    *name = slash + 1;
    return stat(path, &found) ? 0 : found.st_ino;
}

/* Keep a file that is about to lose its name, under another one; that, or "" for none. */
static void keep(const char *path, char *name) {
    char target[PATH_MAX + 64];
    static uint64_t kept;
    name[0] = 0;
    snprintf(name, 64, "kept-%d-%lu", getpid(), (unsigned long)__atomic_add_fetch(&kept, 1, 5));
    snprintf(target, sizeof target, "%s/%s", journal_directory, name);
    int error = errno;
    if (REAL(linkat)(AT_FDCWD, path, AT_FDCWD, target, 0)) name[0] = 0;
    errno = error;
}

/* --- files ----------------------------------------------------------------------------------- */

static int open_entry(int fd, int flags) {
    struct stat found;
    if (fd >= 0 && fd < DESCRIPTORS && !fstat(fd, &found)) {
        inodes[fd] = found.st_ino;
        entries[fd] = S_ISDIR(found.st_mode) ? DIRECTORY_ENTRY : S_ISREG(found.st_mode) ? FILE_ENTRY : 0;
        if (entries[fd] && (flags & O_DSYNC)) entries[fd] |= DURABLE_ENTRY;
    }
    return fd;
}

static uint8_t entry_of(int fd) {
    return control && fd >= 0 && fd < DESCRIPTORS ? entries[fd] : 0;
}

static int open_noted(int directory, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (!resolve(directory, name, path)) {
        int fd = REAL(openat)(directory, name, flags, mode);
        if (control && fd >= 0 && fd < DESCRIPTORS) entries[fd] = 0;
        return fd;
    }
    uint64_t made = 0, cut = 0;
    struct stat found;
    if (flags & (O_CREAT | O_TRUNC)) {
        int kept = errno, is_there = !stat(path, &found);
        errno = kept;
        if (!is_there && (flags & O_CREAT)) {
            if (control->write_errno) return fail_with(control->write_errno);
            if (is_noted()) {
                char copy[PATH_MAX];
                const char *base;
                strcpy(copy, path);
                struct record record = {.kind = MADE, .inode = parent_of(copy, &base)};
                made = note(record, base, NULL, NULL);
            }
        } else if (is_there && (flags & O_TRUNC) && !(flags & O_EXCL) && found.st_size && is_noted()) {
            int fd = REAL(open)(path, O_RDONLY | O_CLOEXEC);
            if (fd >= 0) {
                cut = note_change(CUT, fd, found.st_ino, 0, 0);
                REAL(close)(fd);
            }
        }
    }
    int fd = open_entry(REAL(openat)(directory, name, flags, mode), flags);
    note_done(made, fd >= 0);
    note_done(cut, fd >= 0);
    return fd;
}

#define MODE_OF(flags, mode)                                   \
    mode_t mode = 0;                                           \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                   \
        va_list more;                                          \
        va_start(more, flags);                                 \
        mode = va_arg(more, mode_t);                           \
        va_end(more);                                          \
    }

int open(const char *name, int flags, ...) {
    MODE_OF(flags, mode)
    return open_noted(AT_FDCWD, name, flags, mode);
}
int open64(const char *name, int flags, ...) {
    MODE_OF(flags, mode)
    return open_noted(AT_FDCWD, name, flags | O_LARGEFILE, mode);
}
int openat(int directory, const char *name, int flags, ...) {
    MODE_OF(flags, mode)
    return open_noted(directory, name, flags, mode);
}
int openat64(int directory, const char *name, int flags, ...) {
    MODE_OF(flags, mode)
    return open_noted(directory, name, flags | O_LARGEFILE, mode);
}
int __open_2(const char *name, int flags) { return open_noted(AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { return open_noted(AT_FDCWD, name, flags, 0); }
int __openat_2(int d, const char *name, int flags) { return open_noted(d, name, flags, 0); }
int __openat64_2(int d, const char *name, int flags) { return open_noted(d, name, flags, 0); }

int close(int fd) {
    if (fd >= 0 && fd < DESCRIPTORS) entries[fd] = 0;
    return REAL(close)(fd);
}

/* What goes before and after each write; the write itself is ``CALL``. */
#define WRITING(type, fd, offset_of, length_of, CALL)                                     \
    uint8_t entry = entry_of(fd);                                                         \
    if (!entry) return CALL;                                                              \
    linger();                                                                             \
    if (control->write_errno) return fail_with(control->write_errno);                     \
    if (entry & DURABLE_ENTRY && control->sync_errno) return fail_with(control->sync_errno); \
    uint64_t id = is_noted() ? note_change(WRITE, fd, inodes[fd], offset_of, length_of) : 0; \
    type result = CALL;                                                                   \
    note_done(id, result >= 0);                                                           \
    if (id && result >= 0 && entry & DURABLE_ENTRY)                                       \
        note((struct record){.kind = DURABLE, .id = id}, NULL, NULL, NULL);               \
    return result;

static off_t position(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return lseek(fd, 0, flags & O_APPEND ? SEEK_END : SEEK_CUR);
}
static size_t total(const struct iovec *parts, int count) {
    size_t size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    return size;
}

ssize_t write(int fd, const void *data, size_t size) {
    WRITING(ssize_t, fd, position(fd), size, REAL(write)(fd, data, size))
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    WRITING(ssize_t, fd, at, size, REAL(pwrite)(fd, data, size, at))
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return pwrite(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
    WRITING(ssize_t, fd, position(fd), total(parts, count), REAL(writev)(fd, parts, count))
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    WRITING(ssize_t, fd, at, total(parts, count), REAL(pwritev)(fd, parts, count, at))
}
ssize_t pwritev64(int fd, const struct iovec *p, int n, off_t at) { return pwritev(fd, p, n, at); }
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    WRITING(ssize_t, fd, at < 0 ? position(fd) : at, total(parts, count),
            REAL(pwritev2)(fd, parts, count, at, flags))
}
ssize_t pwritev64v2(int fd, const struct iovec *p, int n, off_t at, int flags) {
    return pwritev2(fd, p, n, at, flags);
}

int ftruncate(int fd, off_t size) {
    uint8_t entry = entry_of(fd);
    if (!entry) return REAL(ftruncate)(fd, size);
    struct stat now;
    int grows = !fstat(fd, &now) && size > now.st_size;
    linger();
    /* A full disk has room for less. */
    if (control->write_errno && (grows || !is_full(control->write_errno)))
        return fail_with(control->write_errno);
    uint64_t id = note_change(CUT, fd, inodes[fd], size, 0);
    int result = REAL(ftruncate)(fd, size);
    note_done(id, !result);
    return result;
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int fallocate(int fd, int mode, off_t at, off_t size) {
    if (entry_of(fd) && control->write_errno) return fail_with(control->write_errno);
    return REAL(fallocate)(fd, mode, at, size);
}
int fallocate64(int fd, int mode, off_t at, off_t size) { return fallocate(fd, mode, at, size); }
int posix_fallocate(int fd, off_t at, off_t size) {
    if (entry_of(fd) && control->write_errno) return control->write_errno;
    return REAL(posix_fallocate)(fd, at, size);
}
int posix_fallocate64(int fd, off_t at, off_t size) { return posix_fallocate(fd, at, size); }

/* The sync itself is ``CALL``; inode 0 stands for everything. */
#define SYNCING(fd, synced, CALL)                                                          \
    if (!entry_of(fd)) return CALL;                                                        \
    linger();                                                                              \
    uint64_t id = is_noted() ? note((struct record){.kind = SYNC, .inode = synced}, NULL,  \
                                    NULL, NULL) : 0;                                       \
    int wrong = control->sync_errno;                                                       \
    int result = wrong ? fail_with(wrong) : CALL;                                          \
    if (id) note((struct record){.kind = SYNCED, .id = id, .inode = synced, .other = !result}, \
                 NULL, NULL, NULL);                                                        \
    return result;

int fsync(int fd) { SYNCING(fd, inodes[fd], REAL(fsync)(fd)) }
int fdatasync(int fd) { SYNCING(fd, inodes[fd], REAL(fdatasync)(fd)) }
int syncfs(int fd) { SYNCING(fd, 0, REAL(syncfs)(fd)) }
int sync_file_range(int fd, off_t at, off_t size, unsigned flags) {
    /* Nothing is durable by it: neither sizes nor the disk's own cache are written. */
    if (entry_of(fd)) {
        linger();
        if (control->sync_errno) return fail_with(control->sync_errno);
    }
    return REAL(sync_file_range)(fd, at, size, flags);
}

/* --- names ----------------------------------------------------------------------------------- */

static int rename_noted(int from, const char *source, int to, const char *target) {
    char old[PATH_MAX], new[PATH_MAX], kept[64] = "";
    int is_ours = resolve(from, source, old);
    if (!resolve(to, target, new) || !is_ours) return REAL(renameat)(from, source, to, target);
    if (control->write_errno && !is_full(control->write_errno)) return fail_with(control->write_errno);
    uint64_t id = 0;
    if (is_noted()) {
        const char *name, *other;
        char names[PATH_MAX + 64];
        keep(new, kept);
        struct record record = {.kind = RENAMED, .inode = parent_of(old, &name)};
        record.other = parent_of(new, &other);
        /* Two names in one string: what was kept goes behind the new name. */
        snprintf(names, sizeof names, "%s/%s", other, kept);
        id = note(record, name, names, NULL);
    }
    int result = REAL(renameat)(from, source, to, target);
    note_done(id, !result);
    return result;
}
int rename(const char *source, const char *target) {
    return rename_noted(AT_FDCWD, source, AT_FDCWD, target);
}
int renameat(int from, const char *source, int to, const char *target) {
    return rename_noted(from, source, to, target);
}

int unlinkat(int directory, const char *target, int flags) {
    char path[PATH_MAX], kept[64] = "";
    if (!resolve(directory, target, path)) return REAL(unlinkat)(directory, target, flags);
    if (control->write_errno && !is_full(control->write_errno)) return fail_with(control->write_errno);
    uint64_t id = 0;
    if (is_noted()) {
        const char *name;
        if (!(flags & AT_REMOVEDIR)) keep(path, kept);
        struct record record = {.kind = GONE, .inode = parent_of(path, &name)};
        id = note(record, name, kept, NULL);
    }
    int result = REAL(unlinkat)(directory, target, flags);
    note_done(id, !result);
    return result;
}
int unlink(const char *target) { return unlinkat(AT_FDCWD, target, 0); }
int rmdir(const char *target) { return unlinkat(AT_FDCWD, target, AT_REMOVEDIR); }

#define MAKING(directory, target, CALL)                                          \
    char path[PATH_MAX];                                                         \
    if (!resolve(directory, target, path)) return CALL;                          \
    if (control->write_errno) return fail_with(control->write_errno);            \
    uint64_t id = 0;                                                             \
    if (is_noted()) {                                                            \
        const char *name;                                                        \
        struct record record = {.kind = MADE, .inode = parent_of(path, &name)};  \
        id = note(record, name, NULL, NULL);                                     \
    }                                                                            \
    int result = CALL;                                                           \
    note_done(id, !result);                                                      \
    return result;

int mkdirat(int directory, const char *target, mode_t mode) {
    MAKING(directory, target, REAL(mkdirat)(directory, target, mode))
}
int mkdir(const char *target, mode_t mode) { return mkdirat(AT_FDCWD, target, mode); }
int linkat(int from, const char *source, int to, const char *target, int flags) {
    MAKING(to, target, REAL(linkat)(from, source, to, target, flags))
}
int link(const char *source, const char *target) {
    return linkat(AT_FDCWD, source, AT_FDCWD, target, 0);
}

/* --- room ------------------------------------------------------------------------------------ */

static void empty(struct statvfs *room, int result, int is_ours) {
    if (!result && is_ours && is_full(control->write_errno)) room->f_bfree = room->f_bavail = 0;
}
int statvfs(const char *name, struct statvfs *room) {
    char path[PATH_MAX];
    int result = REAL(statvfs)(name, room);
    empty(room, result, resolve(AT_FDCWD, name, path));
    return result;
}
int fstatvfs(int fd, struct statvfs *room) {
    int result = REAL(fstatvfs)(fd, room);
    empty(room, result, entry_of(fd));
    return result;
}
int statvfs64(const char *name, struct statvfs64 *room) { return statvfs(name, (struct statvfs *)room); }
int fstatvfs64(int fd, struct statvfs64 *room) { return fstatvfs(fd, (struct statvfs *)room); }

/* --- the wall clock -------------------------------------------------------------------------- */

static int64_t off_by_us(void) {
    if (!control || !control->clock_us) return 0;
    uint32_t strobe_us = control->strobe_us;
    if (!strobe_us) return control->clock_us;
    struct timespec now;
    REAL(clock_gettime)(CLOCK_MONOTONIC, &now);
    uint64_t us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
    return us / strobe_us % 2 ? 0 : control->clock_us;
}

static void move(struct timespec *at, int64_t us) {
    int64_t ns = at->tv_nsec + us % 1000000 * 1000;
    at->tv_sec += us / 1000000 + (ns >= 1000000000) - (ns < 0);
    at->tv_nsec = ns + (ns < 0 ? 1000000000 : ns >= 1000000000 ? -1000000000 : 0);
}

static int is_wall(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

/* By how much the clock was off when this thread last asked it: what a time was made of until which it
 * waits. By now it may be off by something else. */
static __thread int64_t told_us;

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = REAL(clock_gettime)(clock, now);
    if (!result && is_wall(clock)) move(now, told_us = off_by_us());
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    (void)zone; /* No system has kept one for long. */
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    *now = (struct timeval){found.tv_sec, found.tv_nsec / 1000};
    return 0;
}
time_t time(time_t *into) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME_COARSE, &found);
    if (into) *into = found.tv_sec;
    return found.tv_sec;
}

/* Until when to wait is said by the clock that is off, and the kernel waits by its own. Condition
 * variables are left as they are: those of a node wait by the monotonic clock. */
static struct timespec by_the_kernel(const struct timespec *until) {
    struct timespec moved = *until;
    move(&moved, -told_us);
    /* The kernel refuses what is before 1970, and gRPC aborts where it does. */
    return moved.tv_sec < 0 ? (struct timespec){0, 0} : moved;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    struct timespec moved = by_the_kernel(until);
    return REAL(sem_timedwait)(semaphore, &moved);
}

/* Whether a call of the futex waits until a time of the wall clock; FUTEX_WAIT waits for so long. */
static int waits_by_the_wall(long operation) {
    return operation & FUTEX_CLOCK_REALTIME && (operation & FUTEX_CMD_MASK) != FUTEX_WAIT;
}

/* gRPC asks the kernel itself. */
long syscall(long number, ...) {
    long a[6];
    va_list more;
    va_start(more, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(more, long);
    va_end(more);
    if (number == SYS_clock_gettime) return clock_gettime((clockid_t)a[0], (struct timespec *)a[1]);
    struct timespec moved;
    if (number == SYS_futex && waits_by_the_wall(a[1]) && a[3]) {
        moved = by_the_kernel((const struct timespec *)a[3]);
        a[3] = (long)&moved;
    }
    return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
