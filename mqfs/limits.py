"""Every limit of mqfs: its unit, its value, its reason. Nothing grows without a limit.

Names end in their unit; without one they count. "Shared": see quotas.py. Code reads `limits.NAME` at the time of use,
so that a test may lower it.
"""

# Messages and names
MESSAGE_BYTES = 1_044_480  # one FUSE request carries it whole, whatever the alignment of the caller's buffer
NAME_BYTES = 255  # NAME_MAX of all file systems to which a name may be copied
PATH_GROUPS = 64  # depth of nesting: keeps every path below PATH_MAX and every walk short
LINE_BYTES = MESSAGE_BYTES  # an incomplete line in a handle (`data line`)

# The tree
GROUPS = 16_384  # groups of one tree: each costs a folder, a lazily opened file, about 14 KiB; shared by their owners
STREAMS = 1_048_576  # streams of one group: about 500 B each, and the STATE record has all of them
SHARE_KEPT = 16  # of each shared bound a sixteenth is for root and the server's user, another for users of this machine
BLOCK_BITS_IPV4, BLOCK_BITS_IPV6 = 24, 64  # hosts whose addresses begin alike count as one user: see quotas.py
HANDLES = 131_072  # open files of all front ends together; shared
PARKED = 65_536  # parked reads and writes of all front ends together; shared
HELD_BYTES = 1 << 30  # memory held for users (partial frames, replies, fids, `.kept`, lines); shared
LISTING_BYTES, LISTED_BYTES = 1_024, 128  # memory, about, for an open directory and for each of its names
LOG_AGAIN_S = 60  # least time between two log lines about one group: a fault repeated each second must not fill a disk
ERRORS = 64  # lines of `.errors` for each user of a group
ERROR_USERS = 64  # users with such lines: 2 MB if each was refused often; the user refused longest ago is forgotten
ERROR_BYTES = 256  # text of a refusal, which may quote the refused command
CTL_BYTES = 65_536  # one write to `ctl` or `.cursor`, and the incomplete line in a handle
DROPPED = 65_536  # messages of a group that were dropped singly and are not below its low watermark yet
ANCHORS = 256  # steps of the wall clock remembered for one group
SHARED_SETTINGS = 256  # texts of ctl with cached settings, shared by groups
SHARED_JSON, SHARED_JSON_BYTES = 256, 2_048  # encoded messages cached for all readers, and the largest: 4 MB
CURSOR_NAMES = 1_024  # names of one `select`
NAMES_SENT = 16_384  # stream names remembered as sent to a reader; above it they are sent again
PREFETCH = 16_384  # messages that one read of a consumer claims, and that one write to it settles
STRETCHES = 1_024  # splits in a reply to `measure`: some 30 KiB
STRETCH_SEGMENTS = 16  # segments that one `measure` scans: a few ms each if not all streams are selected
CURSOR_SLACK_MESSAGES = 1_024  # messages that a `.cursor` may keep from being trimmed in a `replay off` group
PATTERN_BYTES = 512  # a topic pattern: the longest name with a wildcard between any two words
PATTERN_WORDS = 64  # words of a topic pattern: bounds the cost of a name against a hostile pattern (words × words)
PROGRAM_BYTES = 4_096  # a routing program: fits a quoted line of `ctl`, and is parsed within some ms
PROGRAM_SEARCHES = 512  # calls of payload_contains, and of functions of packages, in all programs of a group
PROGRAM_SEARCH_BYTES = 16 << 20  # bytes of one message that they search together: 512 whole bodies of 32 KiB; some ms
PROGRAM_DEPTH = 32  # nested parentheses: far below any recursion limit, more than anyone can read
KEY_WAITING = 65_536  # messages of one consumer that wait for their key: some 20 MB; above it the search stops
BREAKER = 1_024  # dead letters counted by a breaker, which keeps their times
CONSUMERS = 65_536  # consumers of one group: about 2 KiB each, and the STATE record has all of them
PATTERNS = 65_536  # patterns and programs of all views of one group
VIEW_PATTERNS = 1_024  # patterns and programs of one view
HELD = 262_144  # delayed messages of a group: about 300 B of memory each; shared
REQUEST_S = 86_400.0  # longest wait of a request for its reply
SCHEDULES = 1_024  # schedules of a group; shared
DEDUP_IDS = 262_144  # ids remembered by one group: about 250 B each, and the STATE record has them; shared
ID_BYTES = 255  # id of a `.put`
KEY_BYTES = 255  # key of a message: as long as a name
KEYS = 65_536  # keys of a group with `replay key`: some 450 B of memory each, and 7 B at the head of each segment
PUT_BYTES = 65_536  # the JSON object before the body of a `.put`
UNIT_BYTES = 512 << 20  # one atomic batch: recovery reads a torn one whole, and other requests wait for it
BATCH_PIECE_BYTES = 64 << 10  # frames packed in one step: some 5,000 of the smallest, about a millisecond
UNIT_PIECE_BYTES = 1 << 20  # piece of a large atomic batch that is encoded and written at once
UNIT_MESSAGES = 1_048_576  # messages of one atomic batch: others wait for them, and their index is in memory
PARTS = 4_096  # staged parts in the whole tree; shared: some 70 KiB of memory each if small
PART_BUFFER_BYTES = 64 << 10  # memory for the end of a staged part: the rest is on disk; small parts are in memory only
STAGED_BYTES = 8 << 30  # all staged parts together, on disk; in a memory store MEMORY_BYTES; shared
STAGED_ID_BYTES = 600  # memory (HELD_BYTES) charged for an id in a staged part until its commit: it takes 300 to 550
TRANSACTION_IDLE_S = 24 * 3_600  # a staged part without a write for this long is dropped: longer jobs are rare
PRODUCERS = 16_384  # producers remembered by one group: about 100 B each in the STATE record; shared
PRODUCER_KEPT_S = 7 * 24 * 3_600  # without a commit for this long a producer may be forgotten if there are too many
DESCRIPTOR_WAIT_S = 5.0  # longest wait of a write for a sync that lacks a descriptor; then it fails
COMMAND_BYTES = MESSAGE_BYTES  # one write to `.txn/ctl`: it names every part
COMMAND_WORDS = 16_384  # words of such a write: some ms; enough to name all parts, or all producers of a user
HEADER_BYTES = 16_384  # headers of one message: with those that a dead letter adds they must fit a u16
PART_DIGITS = 9  # digits of each number in the header `part`: fits a u32, and an atomic batch has far fewer messages
REASON_BYTES = 1_024  # reason in the headers of a dead letter
KEPT_COPY_BYTES = 4 << 20  # an open `.kept` file up to this size is a copy in memory, if it has few messages
KEPT_COPY_MESSAGES = 1_024  # the most messages of such a copy: reading them one by one takes some 8 ms
KEPT_MESSAGE_BYTES = 72  # charge to a quota `kept=` for a message without body and headers: 32 in log and index each
GROUP_BYTES = 16 << 30  # log of one group on disk; above it the group's `full` decides as at `depth`
SLICE_S = 0.01  # longest piece of work: longer work continues later, and requests are served in between
COALESCED_MESSAGES = 512  # messages that a read under `data coalesce` gathers: 1 to 2 milliseconds
PASSED_MESSAGES = 256  # messages that a read passes over in one piece, in search of a selected one: 1 to 2 milliseconds
SCANNED_MESSAGES = 4  # messages of streams that are not selected: as many count as one passed over
PASSED_BYTES = 4_096  # bytes of a body that count as one more message, as a program may search them
LOOKING_S = 0.001  # longest piece of work that only reads: all others wait for it
PIECE_S = 0.00005  # longest piece of a portioned request while other users are present: the time of one request
TRIM_BYTES = 256 << 10  # written to a log before it is trimmed
MEMORY_BYTES = 256 << 20  # log of one group in a memory store

# The store
SEGMENT_BYTES = 64 << 20  # one segment: small enough to drop and compact, large enough to be few
SEGMENT_RECORDS = 262_144  # records of one segment: keeps the index of the open segment below 8 MiB of memory
SEGMENT_FIRST_BYTES = 64 << 10  # preallocated at first, then doubled
INDEX_STRIDE_BYTES = 1 << 20  # the index of the open segment is extended this often: bounds the scan of a recovery
SEQUENCE_BLOCK = 65_536  # sequences reserved on disk at once
VOLATILE_SEQUENCES = 1 << 32  # reserved at each start for a group with `keep ring`
RING_SEQUENCE_BLOCK = 1 << 22  # the same while a group has a ring: twice the messages published during a sync
GROUP_NUMBER_BLOCK = 256  # group numbers reserved on disk at once
STATE_RECORD_BYTES = 1 << 20  # a larger state is split into several records
OPEN_BUCKETS = 512  # segments kept open at once; well below the usual 1,024 files of a process
DOWNTIME_DAYS = 7  # most by which the engine clock advances over a restart in another boot

# Memory of a process
# malloc returns blocks of this size to the OS at once: above a request, and below the columns of an index, which grow
# and leave holes.
LARGE_BYTES = 5 << 18
KEPT_BYTES = 32 << 20  # freed memory kept for the next requests: some of the largest ones
GARBAGE = 1_000, 5, 1_000  # thresholds of gc: new objects, then collections of the generation before
GARBAGE_CONNECTIONS = 16  # connections between collections of young objects: about a thousand objects

# 9P
MSIZE_LEAST = 4_096
MSIZE_MOST = 1 << 20
MSIZE_DEFAULT = (128 << 10) + 24
CONNECTIONS = 4_096  # connections; shared by users, over TCP by hosts
FIDS = 65_536  # fids of one connection
TURN_S = 0.0002  # longest piece of one user's requests while other users have some
TURN_SHARED_S = 0.25  # two users with a request within this time count as present
TURN_LONG_S = 0.001  # a longer request is followed by a pause of its user, while others are present:
TURN_REST = 3  # at least this many times its own duration,
TURN_REST_REQUESTS = 400  # then until the others had this many: fewer than one in 100 meets such a request,
TURN_REST_S = 0.02  # or had none for so long,
TURN_REST_MOST, TURN_REST_MOST_S = 20, 1.0  # and at most that many times its own duration, or this long
IDLE_AT_ONCE = 16  # connections of one user that are woken in one pass: 20 to 50 us each
ACCEPTED_S = 0.0005  # least time between two accepted connections while other users have requests: some 0.2 ms each
BATCH_S = 0.0005  # longest piece of requests while one user is alone; see BATCHES in connection.py
TAGS = 16_384  # parked requests of one connection; from there on reads are refused; above it the connection is not read
STATS_AT_ONCE = 12  # entries in one reply of 9P2000: 8 us each, and requests are served between two replies
NAMES_AT_ONCE = 128  # the same for 9P2000.L: 1 us each
WALK_NAMES = 16  # the protocol's own limit
SILENT_S = 30  # silence of a TCP connection before keepalive probes: a dead peer may hold what others wait for
ASKED = 3  # keepalive probes, within SILENT_S; the system's defaults take two hours
CLIENT_SILENT_S = 9  # the same for a client, which may have another server: then it also asks the server itself
CLIENT_LINK_BYTES = 16 << 10  # bytes a second that a link carries at least: bytes before the question delay the answer
UNACKNOWLEDGED = 7  # retransmissions by a client's kernel, in 25 s; its own limit is a quarter of an hour
REPLY_BYTES = 1 << 20  # replies that a client has not received yet; above it the connection is not read
FID_BYTES = 1_024  # memory, about, for a fid
HANDSHAKE_S = 10.0  # the TLS handshake, and the time from there to a Tattach: silent clients hold no place for longer
TLS_BYTES = 80 << 10  # memory, about, for the TLS of a connection: a quarter of it while there is no traffic

NAMES_S = 60.0  # names, numbers and groups of the system's users are cached for this long
NAMES_WAIT_S = 1.0  # longest wait of a known user for a new answer of the user database
NAMES_KEPT_S = 900.0  # a known user keeps the last answer for this long if there is no new one
NAMES_RETRY_S = 0.1  # between two attempts to ask while as many look-ups run as allowed
NAMES_KEPT, NAMES_ASKED = 4_096, 32  # answers in the cache, and look-ups at once: threads
TOKEN_BYTES = 1_024  # a secret; most are shorter than a hundred
TOKEN_GUESSES = 3  # wrong tokens before a connection ends
TOKEN_DELAY_S = 2.0  # until the answer to a wrong token; its connection holds a place, so a host has 1,000 a second
TOKEN_FILE_BYTES = 1 << 20  # some thousand users; each attempt is compared with all of them
CONFIG_BYTES = 1 << 20  # a file of options, of users of fq or of a secret: /dev/zero has no end

# HTTP
HTTP_PARSED_BYTES = 1_024  # heads parsed in one piece, at least: some 40 of the smallest, about half a millisecond
HTTP_LINE_BYTES = 8_192  # a request's first line: every path of the tree fits
HTTP_HEADERS = 64  # headers of one request
HTTP_HEADER_BYTES = 16_384  # all headers of one request: as many bytes as of one message
HTTP_TARGETS, HTTP_TARGET_BYTES = 512, 128  # targets in the cache of parsed ones, and the longest of them: 4 MB at most
HTTP_BATCH_BYTES = 16 << 20  # body of a `.batch`; other bodies have the bound of a message
HTTP_HEAD_S = 10.0  # from the first byte of a request to the end of its headers
HTTP_BODY_RATE = 1_024  # least bytes a second of a body, after HTTP_HEAD_S
HTTP_IDLE_S = 60.0  # between two requests of one connection
HTTP_SEND_S = 60.0  # longest time in which the client receives no byte of an answer that has an end
HTTP_LINGER_S = 2.0  # a refused request is read for this long: a reset would destroy its answer
HTTP_REPEAT_S = 1.0  # a connection that publishes to a stream repeatedly keeps it open for this long after a message
HTTP_BEAT_S = 15.0  # silence before a comment: proxies close at 60 s, and only a write finds a peer that vanished
HTTP_CONNECTIONS = 4_096  # connections; shared by users, over TCP by blocks of addresses
HTTP_USER_CONNECTIONS = 256  # connections of one user, over TCP of one host
HTTP_USER_STREAMS = 256  # endless answers of one user at once
HTTP_SEND_BUFFER_BYTES = 256 << 10  # the kernel's buffer of a connection: a slow reader has no more, besides a message
HTTP_PAGE_BYTES = 1 << 20  # a read with a count: `Mqfs-Next` is then known before the first byte
HTTP_READ_BYTES = 16 << 20  # the most for `bytes=`
HTTP_METRIC_LINES = 10_000  # lines of `.metrics`, the most for `streams=`
HTTP_LISTED = 10_000  # names in one answer
HTTP_CLAIMED = 1_000  # messages of one claim or take, tokens of one ack
HTTP_CLAIM_BYTES = 16 << 20  # the answer to a claim or take
HTTP_USER_CLAIMS = 1_000  # open claims of one user
HTTP_LEASE_S = 30.0  # the default lease of a claim
HTTP_LEASE_MOST_S = 12 * 3_600.0
HTTP_WAIT_MOST_S = 3_600.0  # the most for `wait=`
HTTP_FAILURES = 10  # wrong tokens of one address; each later one is answered after HTTP_FAILURE_S
HTTP_FAILURE_S = 1.0
HTTP_ONCE_S = 50.0  # the default wait of `once`: proxies close at 60 s
NTFY_BYTES = 4_096  # a message of the ntfy dialect: its clients expect this bound
NTFY_BEAT_S = 45.0  # silence before a keepalive: as its clients expect, and proxies close at 60 s
DURABLE_BYTES = 4 << 20  # an append of Durable Streams; each message of it has the bound of a message
HTTP_JSON_BYTES = 256 << 10  # an element of a JSON array: some 7 ms to parse, whatever its content
DURABLE_PRODUCERS = 64  # producers remembered for one stream; the one that appended longest ago is forgotten
DURABLE_STATE_BYTES = 8_192  # their state: a header of the next message
DURABLE_FORKS = 64  # depth of forks: a read looks into the stream of each
DURABLE_STATES = 4_096  # streams with a cached state: some KiB each; others are looked up in the log
DURABLE_LOOK_BACK = 64  # newest sequences that are searched first for a state, as other programs may have written since
DURABLE_RECORDS = 1_000  # records of removed streams in `__ds` above the number of live ones; then it is rewritten
DURABLE_WAIT_S = 20.0  # wait of a long poll: as in the protocol's own server
DURABLE_EVENTS_S = 60.0  # duration of an answer of events: as the protocol asks, for caches
HTTP_ADDRESSES = 4_096  # addresses whose wrong tokens are counted; above it the oldest are forgotten

# fq
FQ_HOPS = 32  # hops of one message: the protocol's own limit
FQ_QUEUE_CLIENTS = 16  # clients of a public queue: as in fq
FQ_AUTH_S = 10.0  # from a connection's first byte to its key or authentication, and from a key to its pair
FQ_BATCH = 1_024  # messages of one atomic batch: 64 KiB received at once have more only below 64 bytes each
FQ_SEND_BYTES = 64 << 10  # bytes gathered for one send
FQ_SEND_MESSAGES = 128  # messages gathered for one send: claimed, but not passed to the kernel yet
FQ_WINDOW = 4_096  # messages of one client that its kernel may not have: no more are claimed for it
FQ_HELD = 1_024  # messages of one client that its kernel has and that stay claimed for FQ_HELD_S: if a client is
FQ_HELD_S = 1.0  # killed with unread messages, its connection is reset, and they are redelivered
FQ_CONFIRM_S = 0.02  # between two checks of what the peer's kernel has
FQ_PART_S = 1.0  # wait for the end of a client's data connection, after that of its command connection
FQ_UNACKED_S = 60  # a connection ends after this time without an acknowledgement by the peer's kernel; claims end
FQ_AWAY_S = 10.0  # silence after which a data connection is not read any more, if its command connection has ended
FQ_BEATS = 3  # periods without a sign of life of a client that asked for heartbeats
FQ_POINTS = 16  # checkpoints of a queue: each retains the messages after it

# Bridges
BRIDGE_STOP_S = 10.0  # time for the parts of a bridge of a folder to end; then it is killed, which is safe
BRIDGE_STAMP_BYTES = 4_096  # a bucket in UPDATE, whose size is up to the writer of the folder

# FUSE
UNLINK_AGAIN_S = 1.0  # within this a process may not remove a group's own file twice: see nodes.py
FUSE_REQUEST_BYTES = (1 << 20) + 4_096  # the largest request the kernel sends, with its header
FUSE_TASKS = 16_384  # waiting opens and changes of files, about 7 KiB each; shared
LOCKS = 65_536  # flock and POSIX locks of the whole tree, held and waited for; shared
INTERRUPTS = 1_024  # remembered interrupts that came before their request; also threads that repeat a lookup

# The server
LOG_LINES = 60  # log lines of one statement within LOG_S: repeated faults of clients must not fill a disk
LOG_S = 60.0
SYSLOG_S = 0.5  # longest wait of a line for the daemon, which then counts as stuck: clients do not notice it
LOG_LINE_BYTES = 16 << 10  # a line of JSON: collectors of logs pass on lines of this size whole
AUDIT_REFUSALS = 20  # refusals of one user in a second with an audit line each, some 600 bytes; the others share one
SHUTDOWN_S = 5.0  # time for replies and the last commit at the end

# The library
HANDLER_THREADS = 1_024  # threads of one handler of `on(single=True)`: as many as it may be called at once

# The replica
REPLICA_FRAME_BYTES = 900_000  # one frame: a message of NATS has up to 1 MiB, with its headers
REPLICA_BATCH_BYTES = 64 << 20  # frames that count together in the memory of a standby: the rest is in a file
REPLICA_PART_BYTES = 8 << 20  # part of a segment in one object of a checkpoint
REPLICA_CHECKPOINT_BYTES = 256 << 20  # frames since the last checkpoint, the most that a new standby has to read
REPLICA_CHECKPOINT_FRAMES = 10_000  # the same in frames: an idle store appends one each REPLICA_BEAT_S
REPLICA_PAGE = 10_000  # names of objects listed at once
REPLICA_REMOVED_PARTS = 1_000  # parts removed at once after a checkpoint
REPLICA_UPLOAD_S = 3_600.0  # longest upload to an engine: a longer one fails, and its objects are removed
REPLICA_REPORTS = 64  # standbys whose reports are kept
REPLICA_WARNING_S = 60.0  # between two log lines about an engine that does not answer
REPLICA_SILENT_S = 15.0  # silence of the engine before /.ready and the page report it
REPLICA_BEAT_S = 1.0  # between two frames of an idle primary: a standby misses it after several
REPLICA_LOOK_S = 2.0  # between two checks of a primary for a request to hand over: an object store charges for them
REPLICA_HANDOVER_S = 20.0  # longest hand-over by a primary, before the standby takes over by force
REPLICA_CALL_S = 5.0  # longest answer of an engine; then the outcome is looked up
REPLICA_PART_S = 20.0  # the same for a part of a checkpoint, of which two are uploaded at once: needs 7 Mbit/s
REPLICA_PACE_S = 0.05  # between two groups of frames that no writer waits for: fewer take less processor time
REPLICA_OBJECT_S = 0.7  # the same for an object store: it charges for each, and for reports of standbys
REPLICA_STATE_S = 10.0  # between two records of the synced position: a start reads the frames since
REPLICA_RESTORE_S = 60.0  # longest wait of a restore for an engine that does not answer
REPLICA_RETRY_S = 2.0  # longest pause between two attempts at an engine that does not answer

# `mqfs bench`
BENCH_PRODUCERS = BENCH_CONSUMERS = 256  # processes of each kind: some 20 MB each
BENCH_WORKERS = 64  # see bench/payload.py: the deliveries of one message to all workers together fit a byte
BENCH_MESSAGES = 1_000_000_000  # messages of one run: their numbers fit 4 bytes
BENCH_BATCH = 4_096  # as many messages as the library queues
BENCH_SECONDS = 86_400  # a day
BENCH_DRAIN_S = 5.0  # after Ctrl-C: for published messages to arrive
BENCH_STALL_S = 30.0  # without a message while some are missing: then the run is aborted

# Rings
RING_BYTES = 16 << 20  # records of one group's ring: a reader further behind reads the log
RINGS = 64  # rings of one server: a GiB of memory; shared by the owners of the groups
RING_RANGE_BYTES = 1 << 20  # copied into the log at once
RING_TURN_BYTES = 1 << 20  # copied before the server's other tasks run: some 10 ms if messages are small
RING_PATIENCE_S = 0.1  # longest wait of the server for a ring's lock, before it retires the ring
RING_HOLD_S = 0.5  # longest hold of a ring's lock by a client: with its detection, others wait less than a second
RING_CHANGE_S = 60.0  # the log retains messages for readers of an ended ring for this long
RING_IDLE_S = 60.0  # a ring is kept for this long after its last client disconnected
RING_CORRUPT = 3  # times within RING_REST_S that an owner's rings may be corrupt or block the server; then it gets none
RING_REST_S = 60.0
RING_DOORS = 4_096  # connections to attach sockets, one for each attachment; shared
RING_PACKET_BYTES = 8_192  # a packet of the attach socket: a path of PATH_MAX fits
ATTACHMENTS = 63  # clients of one ring: it has 64 consumer slots, one of them the server's
