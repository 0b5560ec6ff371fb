/*
 * A reader in C: wait for messages of several streams with poll(2) and read(2). One read is one message.
 *
 *   cc -O2 -Wall -Wextra -o reader examples/reader.c      (or: make -C examples)
 *   ./reader ./mq/room/alice ./mq/room/bob
 *
 * Prints "PATH: MESSAGE". A stream ends when it is removed. The program ends when all have ended, or with Ctrl-C.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MESSAGE_BYTES = 1044480, STREAMS = 64 };	/* the most bytes of a message */

static char message[MESSAGE_BYTES];

static void
print(const char *path, ssize_t n)
{
	printf("%s: ", path);
	fwrite(message, 1, n, stdout);	/* %.*s would stop at a zero byte */
	if (n == 0 || message[n - 1] != '\n')
		putchar('\n');
	fflush(stdout);
}

/* Whether the stream was removed: then it has no name and no more messages. */
static int
is_removed(int fd)
{
	struct stat st;

	return fstat(fd, &st) != 0 || st.st_nlink == 0;
}

/*
 * Print the present messages. Return 0 at the end of the stream, else 1. A read returns 0 at the end, but also for an
 * empty message, and for an EOF marker (`eof STREAM` in ctl), which is printed like an empty message.
 */
static int
drain(int fd, const char *path)
{
	ssize_t n;

	while ((n = read(fd, message, sizeof message)) >= 0 || errno == EINTR) {
		if (n == 0 && is_removed(fd))
			return 0;
		if (n >= 0)
			print(path, n);
	}
	if (errno == EAGAIN)
		return 1;
	if (errno == EPIPE) {	/* reported once; the next read continues at the oldest message kept */
		fprintf(stderr, "reader: %s: messages were lost\n", path);
		return 1;
	}
	fprintf(stderr, "reader: %s: %s\n", path, strerror(errno));
	exit(1);
}

int
main(int argc, char *argv[])
{
	struct pollfd fds[STREAMS];
	int i, count = argc - 1, open_streams = count;

	if (count < 1 || count > STREAMS) {
		fprintf(stderr, "usage: reader STREAM... (at most %d)\n", STREAMS);
		return 2;
	}
	for (i = 0; i < count; i++) {
		fds[i].events = POLLIN;
		fds[i].fd = open(argv[i + 1], O_RDONLY | O_NONBLOCK);
		if (fds[i].fd < 0) {
			fprintf(stderr, "reader: %s: %s\n", argv[i + 1], strerror(errno));
			return 1;
		}
	}
	while (open_streams > 0) {
		if (poll(fds, count, -1) < 0 && errno != EINTR) {
			perror("reader: poll");
			return 1;
		}
		for (i = 0; i < count; i++) {
			if (fds[i].fd >= 0 && fds[i].revents != 0 && !drain(fds[i].fd, argv[i + 1])) {
				close(fds[i].fd);
				fds[i].fd = -1;	/* poll skips it */
				open_streams--;
			}
		}
	}
	return 0;
}
