/* Counts what processes do to the files below one folder, and kills or signals the one that is about to do the k-th.
 *
 * Preloaded (LD_PRELOAD) into a process and all its forks, which share the counter in a mapped file. An effect is a
 * call that changes a file or a folder; killing before each of them, in the order of the program, covers every state
 * that a kill can leave behind. Calls that change nothing (a folder that is there already) do not count, nor do logs,
 * nor the pages of databases, whose engines see to those. Asked to, it also records every operation with its data.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* As `Control` in points.py packs it. */
struct control {
    _Atomic unsigned armed;   /* 0: nothing is counted */
    _Atomic unsigned count;   /* effects so far */
    unsigned at, again;       /* numbers of the effects that are stopped; 0: none */
    unsigned signal_number;   /* sent at those */
    unsigned all;             /* 1: after the first, every process dies at its next effect, as if the machine had */
    unsigned every;           /* 1: what makes a change durable counts too, and pages of databases */
    unsigned root_length;
    char root[1024];
};

static struct control *control;
static int trace = -1, record = -1;
static __thread char scratch[PATH_MAX]; /* the hidden file that this thread wrote into last */

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("EFFECTS_CONTROL"), *traced = getenv("EFFECTS_TRACE"),
               *recorded = getenv("EFFECTS_RECORD");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) control = mapped;
    if (traced) trace = open(traced, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (recorded) record = open(recorded, O_WRONLY | O_APPEND | O_CLOEXEC);
    close(fd);
}

static int is_counted(const char *path) {
    size_t n = strlen(path);
    return strncmp(path, control->root, control->root_length) == 0 && !(n > 4 && strcmp(path + n - 4, ".log") == 0);
}

static void effect(const char *kind, const char *path) {
    int before = errno;
    unsigned n = atomic_fetch_add(&control->count, 1) + 1;
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%u\t%d\t%s\t%s\n", n, (int)getpid(), kind, path + control->root_length);
    if (trace >= 0 && length > 0 && write(trace, line, (size_t)length) < 0) abort();
    if (control->at && (n == control->at || n == control->again || (control->all && n > control->at)))
        kill(getpid(), (int)control->signal_number);
    errno = before;
}

static void absolute(int folder, const char *path, char *out) {
    char base[PATH_MAX] = "";
    if (path[0] != '/') {
        char link[64];
        ssize_t n = -1;
        if (folder == AT_FDCWD) {
            if (getcwd(base, sizeof base)) n = (ssize_t)strlen(base);
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            n = readlink(link, base, sizeof base - 1);
        }
        base[n < 0 ? 0 : n] = 0;
        snprintf(out, 2 * PATH_MAX, "%s/%s", base, path);
    } else {
        snprintf(out, 2 * PATH_MAX, "%s", path);
    }
}

/* Appends an operation to the record, which points.py reads. */
static void note(char kind, const char *path, const char *to, off64_t at, const struct iovec *data, int parts) {
    if (record < 0 || !control || !control->armed || !is_counted(path)) return;
    struct { unsigned kind, path, to; unsigned long long at, size; } head = {.kind = (unsigned)kind};
    struct iovec all[16] = {{&head, sizeof head}, {(void *)path, strlen(path)}, {(void *)to, strlen(to)}};
    if (parts > 13) abort();
    for (int i = 0; i < parts; i++) {
        all[3 + i] = data[i];
        head.size += data[i].iov_len;
    }
    head.at = (unsigned long long)at;
    head.path = (unsigned)all[1].iov_len;
    head.to = (unsigned)all[2].iov_len;
    int before = errno;
    if (syscall(SYS_writev, record, all, 3 + parts) < 0) abort();
    errno = before;
}

static void note_path(char kind, int folder, const char *path, off64_t at) {
    if (record < 0) return;
    char where[2 * PATH_MAX];
    absolute(folder, path, where);
    note(kind, where, "", at, NULL, 0);
}

static void note_file(char kind, int fd, off64_t at, const struct iovec *data, int parts) {
    if (record < 0 || fd == record || fd == trace) return;
    char link[64], where[PATH_MAX];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, where, sizeof where - 1);
    if (n > 0) {
        where[n] = 0;
        if (at < 0) at = fcntl(fd, F_GETFL) & O_APPEND ? lseek64(fd, 0, SEEK_END) : lseek64(fd, 0, SEEK_CUR);
        if (where[0] == '/') note(kind, where, "", at, data, parts);
    }
    errno = before;
}

static int is_there(int folder, const char *path) {
    struct stat found;
    int before = errno, there = fstatat(folder, path, &found, AT_SYMLINK_NOFOLLOW) == 0;
    errno = before;
    return there;
}

static void of_path(const char *kind, int folder, const char *path, int if_there) {
    if (!control || !control->armed || is_there(folder, path) != if_there) return;
    char where[2 * PATH_MAX];
    absolute(folder, path, where);
    if (is_counted(where)) effect(kind, where);
}

static void of_file(const char *kind, int fd, int is_rare) {
    if (!control || !control->armed || (is_rare && !control->every)) return;
    char link[64], where[PATH_MAX];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, where, sizeof where - 1);
    errno = before;
    if (n < 0) return;
    where[n] = 0;
    if (!is_counted(where)) return;
    /* A hidden file is read by nobody before it is renamed: of its writes in a row, one is enough. */
    const char *name = strrchr(where, '/');
    if (strcmp(kind, "write") == 0 && name && name[1] == '.') {
        if (strcmp(where, scratch) == 0) return;
        strcpy(scratch, where);
    }
    effect(kind, where);
}

static void opened(int folder, const char *path, int flags) {
    if (flags & O_CREAT && !is_there(folder, path)) {
        of_path("create", folder, path, 0);
        note_path('c', folder, path, 0);
    } else if (flags & O_TRUNC) {
        of_path("empty", folder, path, 1);
        note_path('t', folder, path, 0);
    }
}

static void renamed(int here, const char *from, int there, const char *to) {
    of_path("rename", here, from, 1);
    if (record < 0) return;
    char source[2 * PATH_MAX], target[2 * PATH_MAX];
    absolute(here, from, source);
    absolute(there, to, target);
    note('r', source, target, 0, NULL, 0);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENING(name)                                                                  \
    int name(const char *path, int flags, ...) {                                       \
        va_list more;                                                                  \
        va_start(more, flags);                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;        \
        va_end(more);                                                                  \
        opened(AT_FDCWD, path, flags);                                                 \
        return NEXT(name)(path, flags, mode);                                          \
    }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name)                                                               \
    int name(int folder, const char *path, int flags, ...) {                           \
        va_list more;                                                                  \
        va_start(more, flags);                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;        \
        va_end(more);                                                                  \
        opened(folder, path, flags);                                                   \
        return NEXT(name)(folder, path, flags, mode);                                  \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

int mkdir(const char *path, mode_t mode) {
    of_path("mkdir", AT_FDCWD, path, 0);
    if (!is_there(AT_FDCWD, path)) note_path('d', AT_FDCWD, path, 0);
    return NEXT(mkdir)(path, mode);
}
int rename(const char *from, const char *to) {
    renamed(AT_FDCWD, from, AT_FDCWD, to);
    return NEXT(rename)(from, to);
}
int renameat(int here, const char *from, int there, const char *to) {
    renamed(here, from, there, to);
    return NEXT(renameat)(here, from, there, to);
}
int unlink(const char *path) {
    of_path("unlink", AT_FDCWD, path, 1);
    note_path('u', AT_FDCWD, path, 0);
    return NEXT(unlink)(path);
}
int unlinkat(int folder, const char *path, int flags) {
    of_path("unlink", folder, path, 1);
    note_path('u', folder, path, 0);
    return NEXT(unlinkat)(folder, path, flags);
}
int rmdir(const char *path) {
    of_path("rmdir", AT_FDCWD, path, 1);
    note_path('u', AT_FDCWD, path, 0);
    return NEXT(rmdir)(path);
}
int fsync(int fd) {
    of_file("fsync", fd, 1);
    note_file('s', fd, 0, NULL, 0);
    return NEXT(fsync)(fd);
}
int fdatasync(int fd) {
    of_file("fsync", fd, 1);
    note_file('s', fd, 0, NULL, 0);
    return NEXT(fdatasync)(fd);
}
int ftruncate64(int fd, off64_t length) {
    of_file("truncate", fd, 0);
    note_file('t', fd, length, NULL, 0);
    return NEXT(ftruncate64)(fd, length);
}
int ftruncate(int fd, off_t length) {
    of_file("truncate", fd, 0);
    note_file('t', fd, length, NULL, 0);
    return NEXT(ftruncate)(fd, length);
}
ssize_t write(int fd, const void *data, size_t size) {
    if (fd != trace) of_file("write", fd, 0);
    note_file('w', fd, -1, &(struct iovec){(void *)data, size}, 1);
    return NEXT(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *data, int size) {
    of_file("write", fd, 0);
    note_file('w', fd, -1, data, size);
    return NEXT(writev)(fd, data, size);
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
    of_file("write", to, 0);
    note_file('?', to, 0, NULL, 0); /* what is copied in the kernel is not seen here */
    return NEXT(sendfile64)(to, from, at, size);
}
ssize_t sendfile(int to, int from, off_t *at, size_t size) {
    of_file("write", to, 0);
    note_file('?', to, 0, NULL, 0); /* what is copied in the kernel is not seen here */
    return NEXT(sendfile)(to, from, at, size);
}
ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size, unsigned flags) {
    of_file("write", to, 0);
    note_file('?', to, 0, NULL, 0); /* what is copied in the kernel is not seen here */
    return NEXT(copy_file_range)(from, from_at, to, to_at, size, flags);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    of_file("page", fd, 1);
    note_file('w', fd, at, &(struct iovec){(void *)data, size}, 1);
    return NEXT(pwrite64)(fd, data, size, at);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    of_file("page", fd, 1);
    note_file('w', fd, at, &(struct iovec){(void *)data, size}, 1);
    return NEXT(pwrite)(fd, data, size, at);
}
