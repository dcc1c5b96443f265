/* Records what processes do to the files below one folder, with the data that they write.
 *
 * Preloaded (LD_PRELOAD) into a process and all its forks, which record while EFFECTS_RECORD names a file and
 * EFFECTS_ROOT a folder. Logs are left out.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* Appends an operation, as points.py reads it. */
static void append(char kind, const char *path, const char *to, off64_t at, const struct iovec *data, int parts) {
    const char *root = getenv("EFFECTS_ROOT"), *record = getenv("EFFECTS_RECORD");
    size_t n = strlen(path);
    if (!root || !record || strncmp(path, root, strlen(root)) || (n > 4 && !strcmp(path + n - 4, ".log"))) return;
    struct { unsigned kind, path, to; unsigned long long at, size; } head = {.kind = (unsigned)kind};
    struct iovec all[16] = {{&head, sizeof head}, {(void *)path, n}, {(void *)to, strlen(to)}};
    if (parts > 13) abort();
    for (int i = 0; i < parts; i++) {
        all[3 + i] = data[i];
        head.size += data[i].iov_len;
    }
    head.at = (unsigned long long)at;
    head.path = (unsigned)all[1].iov_len;
    head.to = (unsigned)all[2].iov_len;
    int before = errno;
    long file = syscall(SYS_openat, AT_FDCWD, record, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || syscall(SYS_writev, file, all, 3 + parts) < 0) abort();
    syscall(SYS_close, file);
    errno = before;
}

static void resolve(int folder, const char *path, char *out) {
    char base[PATH_MAX] = "", link[64];
    int before = errno;
    if (path[0] == '/') {
        snprintf(out, 2 * PATH_MAX, "%s", path);
        return;
    }
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    ssize_t n = readlink(link, base, sizeof base - 1);
    base[n < 0 ? 0 : n] = 0;
    snprintf(out, 2 * PATH_MAX, "%s/%s", base, path);
    errno = before;
}

static void of_path(char kind, int folder, const char *path) {
    char where[2 * PATH_MAX];
    resolve(folder, path, where);
    append(kind, where, "", 0, NULL, 0);
}

static void of_file(char kind, int fd, off64_t at, const struct iovec *data, int parts) {
    char link[64], where[PATH_MAX];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, where, sizeof where - 1);
    if (n > 0 && where[0] == '/') {
        where[n] = 0;
        if (at < 0) at = lseek64(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
        append(kind, where, "", at, data, parts);
    }
    errno = before;
}

static int is_there(int folder, const char *path) {
    struct stat found;
    int before = errno, there = fstatat(folder, path, &found, AT_SYMLINK_NOFOLLOW) == 0;
    errno = before;
    return there;
}

static void of_opening(int folder, const char *path, int flags) {
    if (flags & O_CREAT && !is_there(folder, path)) of_path('c', folder, path);
    else if (flags & O_TRUNC) of_path('t', folder, path);
}

static void of_renaming(int here, const char *from, int there, const char *to) {
    char source[2 * PATH_MAX], target[2 * PATH_MAX];
    resolve(here, from, source);
    resolve(there, to, target);
    append('r', source, target, 0, NULL, 0);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENING(name)                                                                  \
    int name(const char *path, int flags, ...) {                                       \
        va_list more;                                                                  \
        va_start(more, flags);                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;        \
        va_end(more);                                                                  \
        of_opening(AT_FDCWD, path, flags);                                             \
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
        of_opening(folder, path, flags);                                               \
        return NEXT(name)(folder, path, flags, mode);                                  \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

int mkdir(const char *path, mode_t mode) {
    if (!is_there(AT_FDCWD, path)) of_path('d', AT_FDCWD, path);
    return NEXT(mkdir)(path, mode);
}
int rename(const char *from, const char *to) {
    of_renaming(AT_FDCWD, from, AT_FDCWD, to);
    return NEXT(rename)(from, to);
}
int renameat(int here, const char *from, int there, const char *to) {
    of_renaming(here, from, there, to);
    return NEXT(renameat)(here, from, there, to);
}
int unlink(const char *path) {
    of_path('u', AT_FDCWD, path);
    return NEXT(unlink)(path);
}
int unlinkat(int folder, const char *path, int flags) {
    of_path('u', folder, path);
    return NEXT(unlinkat)(folder, path, flags);
}
int rmdir(const char *path) {
    of_path('u', AT_FDCWD, path);
    return NEXT(rmdir)(path);
}
int fsync(int fd) {
    of_file('s', fd, 0, NULL, 0);
    return NEXT(fsync)(fd);
}
int fdatasync(int fd) {
    of_file('s', fd, 0, NULL, 0);
    return NEXT(fdatasync)(fd);
}
int ftruncate64(int fd, off64_t length) {
    of_file('t', fd, length, NULL, 0);
    return NEXT(ftruncate64)(fd, length);
}
int ftruncate(int fd, off_t length) {
    of_file('t', fd, length, NULL, 0);
    return NEXT(ftruncate)(fd, length);
}
ssize_t write(int fd, const void *data, size_t size) {
    of_file('w', fd, -1, &(struct iovec){(void *)data, size}, 1);
    return NEXT(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *data, int size) {
    of_file('w', fd, -1, data, size);
    return NEXT(writev)(fd, data, size);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    of_file('w', fd, at, &(struct iovec){(void *)data, size}, 1);
    return NEXT(pwrite64)(fd, data, size, at);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    of_file('w', fd, at, &(struct iovec){(void *)data, size}, 1);
    return NEXT(pwrite)(fd, data, size, at);
}
/* What is copied in the kernel is not seen here: such a record cannot be replayed. */
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
    of_file('?', to, 0, NULL, 0);
    return NEXT(sendfile64)(to, from, at, size);
}
ssize_t sendfile(int to, int from, off_t *at, size_t size) {
    of_file('?', to, 0, NULL, 0);
    return NEXT(sendfile)(to, from, at, size);
}
ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size, unsigned flags) {
    of_file('?', to, 0, NULL, 0);
    return NEXT(copy_file_range)(from, from_at, to, to_at, size, flags);
}
