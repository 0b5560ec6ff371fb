/* Clients that write and read a directory's files and say how fast.
 *
 *   rate DIRECTORY CLIENTS COUNT SIZE    each client its own new file s0, s1, ...: COUNT writes, COUNT reads
 *   rate -w DIRECTORY CLIENTS COUNT SIZE all clients one file s, an open each: COUNT writes
 *   rate -b FILE 1 COUNT SIZE            bare append + fdatasync, no server
 *
 * Prints, of writes and of reads, operations a second by the clock, and operations a second of CPU time, the clients' and
 * that of the process whose number is in $SERVER: on one CPU with nothing else on it the two are the same. Clients begin
 * together.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double server_cpu(void) {
    char path[64];
    double ns = 0;
    snprintf(path, sizeof path, "/proc/%s/schedstat", getenv("SERVER") ? getenv("SERVER") : "none");
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%lf", &ns) != 1) ns = 0;
    if (file) fclose(file);
    return ns * 1e-9;
}

struct board { volatile int ready[2], go[2], done[2], failed; volatile long cpu_ns[2]; };

static void fail(struct board *b, const char *what) { perror(what); b->failed = 1; exit(1); }

static void client(struct board *b, int mode, const char *path, int count, size_t size) {
    if (!mode) unlink(path); /* what is there would be read first */
    int fd = open(path, mode == 'b' ? O_WRONLY | O_CREAT | O_APPEND : mode == 'w' ? O_WRONLY : O_RDWR | O_CREAT, 0666);
    char *data = malloc(size + 1);
    memset(data, 'a', size);
    if (fd < 0) fail(b, path);
    for (int turn = 0; turn < (mode ? 1 : 2); turn++) {
        __sync_fetch_and_add(&b->ready[turn], 1);
        while (!b->go[turn]) usleep(200);
        double used = cpu();
        for (int i = 0; i < count; i++) {
            if (turn) {
                if (read(fd, data, size) != (ssize_t)size) fail(b, "read");
            } else {
                if (write(fd, data, size) != (ssize_t)size) fail(b, "write");
                if (mode == 'b' && fdatasync(fd)) fail(b, "fdatasync");
            }
        }
        __sync_fetch_and_add(&b->cpu_ns[turn], (long)((cpu() - used) * 1e9));
        __sync_fetch_and_add(&b->done[turn], 1);
    }
    exit(0);
}

int main(int argc, char **argv) {
    int mode = argc > 1 && argv[1][0] == '-' ? argv[1][1] : 0;
    if (mode) argv++, argc--;
    if (argc != 5) return 2;
    int clients = atoi(argv[2]), count = atoi(argv[3]);
    size_t size = atol(argv[4]);
    struct board *b = mmap(0, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < clients; i++) {
        char path[4096];
        if (mode == 'b') snprintf(path, sizeof path, "%s", argv[1]);
        else if (mode) snprintf(path, sizeof path, "%s/s", argv[1]);
        else snprintf(path, sizeof path, "%s/s%d", argv[1], i);
        if (!fork()) client(b, mode, path, count, size);
    }
    for (int turn = 0; turn < (mode ? 1 : 2); turn++) {
        while (b->ready[turn] < clients) { if (b->failed) return 1; usleep(200); }
        double begun = now(), used = server_cpu();
        b->go[turn] = 1;
        while (b->done[turn] < clients) { if (b->failed) return 1; usleep(200); }
        double all = clients * (double)count, took = now() - begun;
        printf("%.1f %.1f\n", all / took, all / (server_cpu() - used + b->cpu_ns[turn] * 1e-9));
    }
    while (wait(0) > 0) {}
    return b->failed;
}
