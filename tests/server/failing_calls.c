/* For LD_PRELOAD: calls of libc on files below a folder fail when a test says so.
 *
 * MQFS_FAIL_BELOW names the folder, by its absolute path; MQFS_FAIL_CONTROL the file that is `struct control`, which the
 * test maps too. Of the calls whose kind is in `kinds`, those numbered `first` to `last` fail with `number`.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CHANGE = 1, LOOK = 2, OPEN = 4 };

static struct control {
    _Atomic uint64_t kinds, calls, first, last, number, failed;
} *control;
static const char *folder;
static size_t length;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("MQFS_FAIL_CONTROL");
    int fd = path ? REAL(open64)(path, O_RDWR | O_CLOEXEC) : -1;
    folder = getenv("MQFS_FAIL_BELOW");
    if (fd < 0 || !folder) return;
    length = strlen(folder);
    void *at = REAL(mmap64)(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) control = at;
    close(fd);
}

static int path_below(const char *path) { return path && !strncmp(path, folder, length); }

static int fd_below(int fd)
{
    char link[32], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t got = readlink(link, path, sizeof path - 1);
    if (got < 0) return 0;
    path[got] = 0;
    return path_below(path);
}

static int counts(uint64_t kind) { return control && control->kinds & kind; }

static int fails(int below)
{
    if (!below) return 0;
    uint64_t call = ++control->calls;
    if (call < control->first || call > control->last) return 0;
    control->failed++;
    errno = (int)control->number;
    return 1;
}

static int path_fails(uint64_t kind, const char *path) { return counts(kind) && fails(path_below(path)); }
static int fd_fails(uint64_t kind, int fd) { return counts(kind) && fails(fd_below(fd)); }
static int at_fails(uint64_t kind, int fd, const char *path)
{
    return counts(kind) && fails(path && *path == '/' ? path_below(path) : fd >= 0 && fd_below(fd));
}

#define OF_FD(kind, type, name, given, passed) \
    type name given { return fd_fails(kind, fd) ? (type)-1 : REAL(name) passed; }
#define OF_PATH(kind, type, failed, name, given, passed) \
    type name given { return path_fails(kind, path) ? failed : REAL(name) passed; }
#define OF_AT(kind, name, given, passed) \
    int name given { return at_fails(kind, at, path) ? -1 : REAL(name) passed; }

OF_FD(CHANGE, ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
OF_FD(CHANGE, ssize_t, pwrite, (int fd, const void *data, size_t size, off_t to), (fd, data, size, to))
OF_FD(CHANGE, ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t to), (fd, data, size, to))
OF_FD(CHANGE, ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
OF_FD(CHANGE, ssize_t, pwritev, (int fd, const struct iovec *parts, int count, off_t to), (fd, parts, count, to))
OF_FD(CHANGE, ssize_t, pwritev64, (int fd, const struct iovec *parts, int count, off64_t to), (fd, parts, count, to))
OF_FD(CHANGE, ssize_t, pwritev64v2, (int fd, const struct iovec *parts, int count, off64_t to, int flags),
      (fd, parts, count, to, flags))
OF_FD(CHANGE, int, fsync, (int fd), (fd))
OF_FD(CHANGE, int, fdatasync, (int fd), (fd))
OF_FD(CHANGE, int, sync_file_range, (int fd, off64_t at, off64_t count, unsigned flags), (fd, at, count, flags))
OF_FD(CHANGE, int, ftruncate, (int fd, off_t size), (fd, size))
OF_FD(CHANGE, int, ftruncate64, (int fd, off64_t size), (fd, size))
OF_FD(CHANGE, int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
OF_FD(CHANGE, int, fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size))
OF_PATH(CHANGE, int, -1, truncate, (const char *path, off_t size), (path, size))
OF_PATH(CHANGE, int, -1, truncate64, (const char *path, off64_t size), (path, size))
OF_PATH(CHANGE, int, -1, rename, (const char *path, const char *to), (path, to))
OF_PATH(CHANGE, int, -1, link, (const char *path, const char *to), (path, to))
OF_PATH(CHANGE, int, -1, unlink, (const char *path), (path))
OF_PATH(CHANGE, int, -1, rmdir, (const char *path), (path))
OF_PATH(CHANGE, int, -1, mkdir, (const char *path, mode_t mode), (path, mode))
OF_AT(CHANGE, renameat, (int at, const char *path, int then, const char *to), (at, path, then, to))
OF_AT(CHANGE, linkat, (int at, const char *path, int then, const char *to, int flags), (at, path, then, to, flags))
OF_AT(CHANGE, unlinkat, (int at, const char *path, int flags), (at, path, flags))
OF_AT(CHANGE, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode))

OF_FD(LOOK, ssize_t, read, (int fd, void *data, size_t size), (fd, data, size))
OF_FD(LOOK, ssize_t, pread, (int fd, void *data, size_t size, off_t at), (fd, data, size, at))
OF_FD(LOOK, ssize_t, pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
OF_FD(LOOK, ssize_t, readv, (int fd, const struct iovec *parts, int count), (fd, parts, count))
OF_FD(LOOK, ssize_t, preadv64v2, (int fd, const struct iovec *parts, int count, off64_t at, int flags),
      (fd, parts, count, at, flags))
OF_FD(LOOK, int, fstat, (int fd, struct stat *to), (fd, to))
OF_FD(LOOK, int, fstat64, (int fd, struct stat64 *to), (fd, to))
OF_PATH(LOOK, int, -1, stat, (const char *path, struct stat *to), (path, to))
OF_PATH(LOOK, int, -1, stat64, (const char *path, struct stat64 *to), (path, to))
OF_PATH(LOOK, int, -1, lstat, (const char *path, struct stat *to), (path, to))
OF_PATH(LOOK, int, -1, lstat64, (const char *path, struct stat64 *to), (path, to))
OF_AT(LOOK, fstatat, (int at, const char *path, struct stat *to, int flags), (at, path, to, flags))
OF_AT(LOOK, fstatat64, (int at, const char *path, struct stat64 *to, int flags), (at, path, to, flags))
OF_PATH(OPEN, DIR *, NULL, opendir, (const char *path), (path))

/* These return what failed instead of setting errno. */
int posix_fallocate(int fd, off_t at, off_t size)
{
    return fd_fails(CHANGE, fd) ? errno : REAL(posix_fallocate)(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size)
{
    return fd_fails(CHANGE, fd) ? errno : REAL(posix_fallocate64)(fd, at, size);
}

void *mmap64(void *where, size_t size, int protection, int flags, int fd, off64_t at)
{
    return fd >= 0 && fd_fails(LOOK, fd) ? MAP_FAILED : REAL(mmap64)(where, size, protection, flags, fd, at);
}

#define MODE(mode) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }
#define OPENING(flags) ((flags) & O_CREAT ? OPEN | CHANGE : OPEN)

int open(const char *path, int flags, ...)
{
    MODE(mode)
    return path_fails(OPENING(flags), path) ? -1 : REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...)
{
    MODE(mode)
    return path_fails(OPENING(flags), path) ? -1 : REAL(open64)(path, flags, mode);
}
int openat(int at, const char *path, int flags, ...)
{
    MODE(mode)
    return at_fails(OPENING(flags), at, path) ? -1 : REAL(openat)(at, path, flags, mode);
}
int openat64(int at, const char *path, int flags, ...)
{
    MODE(mode)
    return at_fails(OPENING(flags), at, path) ? -1 : REAL(openat64)(at, path, flags, mode);
}
