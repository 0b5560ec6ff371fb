/* For LD_PRELOAD: the wall clock of a process is wrong by as many nanoseconds as the file MQFS_WRONG_CLOCK says, which a
 * test maps and changes while it runs. And it is in another boot, where MQFS_OTHER_BOOT says in which file its id is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *wrong_ns;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("MQFS_WRONG_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof *wrong_ns, PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) wrong_ns = at;
    close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int done = (int)syscall(SYS_clock_gettime, clock, now);
    if (done == 0 && wrong_ns && clock == CLOCK_REALTIME) {
        int64_t ns = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + *wrong_ns;
        now->tv_sec = ns / 1000000000;
        now->tv_nsec = ns % 1000000000;
    }
    return done;
}

int open64(const char *path, int flags, ...)
{
    static int (*real)(const char *, int, ...);
    const char *other = getenv("MQFS_OTHER_BOOT");
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "open64");
    if (other && !strcmp(path, "/proc/sys/kernel/random/boot_id")) path = other;
    return real(path, flags, mode);
}
