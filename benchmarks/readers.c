/* Threads that wait: readers FILE THREADS. Prints "waiting" when all have begun their read, then, when all have their
 * message, "done" and nothing of its own time: the one who wrote knows when that was. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static volatile int begun, wrong;
static const char *path;

static void *reader(void *unused) {
    char data[64];
    int fd = open(path, O_RDONLY);
    (void)unused;
    if (fd < 0) { perror("open"); wrong = 1; }
    __sync_fetch_and_add(&begun, 1);
    if (read(fd, data, sizeof data) <= 0) { perror("read"); wrong = 1; }
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    int threads = atoi(argv[2]);
    pthread_t *all = calloc(threads, sizeof *all);
    pthread_attr_t attributes;
    path = argv[1];
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 32 << 10);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&all[i], &attributes, reader, 0)) { perror("pthread_create"); return 1; }
    while (begun < threads) usleep(1000);
    puts("waiting");
    fflush(stdout);
    for (int i = 0; i < threads; i++) pthread_join(all[i], 0);
    puts("done");
    return wrong;
}
