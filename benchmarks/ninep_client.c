/* A 9P2000.L client that does nothing but measure: one file, one kind of request, a window of them.
 *
 * usage: ninep_client (unix PATH | tcp PORT) (read|write) FILE ANAME REQUESTS WINDOW
 * Prints the seconds that REQUESTS requests of 64 bytes took, WINDOW of them on their way at a time.
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { BODY = 64, MSIZE = 131096 };
static unsigned char out[1 << 20], in[1 << 20];
static size_t length;
static int sock;

static void die(const char *what) { perror(what); exit(1); }
static void number(uint64_t value, int bytes) { while (bytes--) { out[length++] = value & 255; value >>= 8; } }
static void text(const char *s) { number(strlen(s), 2); memcpy(out + length, s, strlen(s)); length += strlen(s); }

static size_t begin(int type, int tag) {
  size_t at = length;
  number(0, 4); number(type, 1); number(tag, 2);
  return at;
}

static void end(size_t at) {
  size_t now = length;
  length = at; number(now - at, 4); length = now;
}

static void flush(void) {
  for (size_t done = 0; done < length;) {
    ssize_t n = write(sock, out + done, length - done);
    if (n <= 0) die("write");
    done += n;
  }
  length = 0;
}

static uint32_t frame_size(const unsigned char *p) { return p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24; }

static void rpc(int type) { /* send what was made, wait for its reply */
  size_t have = 0;
  flush();
  do {
    ssize_t n = read(sock, in + have, sizeof in - have);
    if (n <= 0) die("read");
    have += n;
  } while (have < 4 || have < frame_size(in));
  if (in[4] != type + 1) { fprintf(stderr, "request %d was answered by %d\n", type, in[4]); exit(1); }
}

static void request(int writing, int tag, uint64_t offset) {
  static const unsigned char body[BODY] = "a message of sixty-four bytes";
  size_t at = begin(writing ? 118 : 116, tag);
  number(1, 4); number(offset, 8); number(BODY, 4);
  if (writing) { memcpy(out + length, body, BODY); length += BODY; }
  end(at);
}

int main(int argc, char **argv) {
  if (argc != 8) { fprintf(stderr, "usage: ninep_client unix|tcp WHERE read|write FILE ANAME REQUESTS WINDOW\n"); return 2; }
  int writing = argv[3][0] == 'w';
  long total = atol(argv[6]), window = atol(argv[7]), sent = 0, done = 0;
  size_t have = 0, want = writing ? 11 : 11 + BODY;
  struct timespec from, to;
  if (argv[1][0] == 'u') {
    struct sockaddr_un where = {.sun_family = AF_UNIX};
    strncpy(where.sun_path, argv[2], sizeof where.sun_path - 1);
    sock = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(sock, (struct sockaddr *)&where, sizeof where)) die(argv[2]);
  } else {
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[2]))};
    int one = 1;
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    sock = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(sock, (struct sockaddr *)&where, sizeof where)) die(argv[2]);
    setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  }
  size_t at = begin(100, 0xffff); number(MSIZE, 4); text("9P2000.L"); end(at); rpc(100);
  at = begin(104, 0); number(0, 4); number(0xffffffff, 4); text(""); text(argv[5]); number(getuid(), 4); end(at); rpc(104);
  at = begin(110, 0); number(0, 4); number(1, 4); number(1, 2); text(argv[4]); end(at); rpc(110);
  at = begin(12, 0); number(1, 4); number(writing ? 1 : 0, 4); end(at); rpc(12);

  clock_gettime(CLOCK_MONOTONIC, &from);
  while (done < total) {
    while (sent < total && sent - done < window) { request(writing, sent % window, (uint64_t)sent * BODY); sent++; }
    flush();
    ssize_t n = read(sock, in + have, sizeof in - have);
    if (n <= 0) die("read");
    have += n;
    size_t used = 0;
    while (have - used >= 7 && have - used >= frame_size(in + used)) {
      if (frame_size(in + used) != want || in[used + 4] != (writing ? 119 : 117)) {
        fprintf(stderr, "reply %ld: type %d, %u bytes\n", done, in[used + 4], frame_size(in + used));
        return 1;
      }
      used += want; done++;
    }
    memmove(in, in + used, have - used);
    have -= used;
  }
  clock_gettime(CLOCK_MONOTONIC, &to);
  printf("%.6f\n", to.tv_sec - from.tv_sec + (to.tv_nsec - from.tv_nsec) / 1e9);
  return 0;
}
