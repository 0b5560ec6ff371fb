/* tunnel HOST PORT PATH: one connection to the unix socket PATH is carried to HOST:PORT, as `ssh -L PATH:...` would. */
#include <arpa/inet.h>
#include <err.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static void carry(int from, int to)
{
	static char buffer[65536];
	ssize_t count = read(from, buffer, sizeof buffer);
	if (count <= 0)
		exit(0);
	for (ssize_t done = 0, n; done < count; done += n)
		if ((n = write(to, buffer + done, count - done)) <= 0)
			exit(0);
}

int main(int argc, char **argv)
{
	struct sockaddr_in there = {.sin_family = AF_INET};
	struct sockaddr_un here = {.sun_family = AF_UNIX};
	if (argc != 4)
		errx(2, "usage: tunnel HOST PORT PATH");
	there.sin_port = htons(atoi(argv[2]));
	inet_pton(AF_INET, argv[1], &there.sin_addr);
	for (size_t i = 0; argv[3][i] && i < sizeof here.sun_path - 1; i++)
		here.sun_path[i] = argv[3][i];
	int listener = socket(AF_UNIX, SOCK_STREAM, 0), far = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(listener, (void *)&here, sizeof here) || listen(listener, 1))
		err(1, "%s", argv[3]);
	int near = accept(listener, NULL, NULL);
	if (near < 0 || connect(far, (void *)&there, sizeof there))
		err(1, "%s", argv[1]);
	struct pollfd ends[2] = {{.fd = near, .events = POLLIN}, {.fd = far, .events = POLLIN}};
	while (poll(ends, 2, -1) > 0) {
		if (ends[0].revents)
			carry(near, far);
		if (ends[1].revents)
			carry(far, near);
	}
	return 0;
}
