"""Every limit of mqfs: its unit, its value, its reason. Nothing grows without one.

Names end in their unit. Code reads them as `limits.NAME` at the time of use, so that a test may lower one.
"""

# Messages and names
MESSAGE_BYTES = 1_044_480  # one FUSE request carries it whole with any alignment of the caller's buffer
NAME_BYTES = 255  # NAME_MAX of every file system a name may be copied to
PATH_GROUPS = 64  # depth of nesting: keeps every path under PATH_MAX and every walk short
LINE_BYTES = MESSAGE_BYTES  # an incomplete line kept in a handle (`data line`)

# The tree
GROUPS = 16_384  # in one tree: each costs a folder, a lazily opened file and about 14 KiB; shared by their owners
STREAMS = 1_048_576  # in one group: about 500 B each, and the state record names them all
SHARE_KEPT = 16  # a sixteenth of what users share is for root and the server's user, one more for users whom the
BLOCK_BITS_IPV4, BLOCK_BITS_IPV6 = 24, 64  # kernel names; hosts whose addresses begin alike are one user: see quotas.py
HANDLES = 131_072  # open files of all front ends together; shared
PARKED = 65_536  # parked reads and writes, all together; shared
HELD_BYTES = 1 << 30  # of memory held for users (partial frames, replies, fids, `.kept`, lines); shared
LISTING_BYTES, LISTED_BYTES = 1_024, 128  # of memory, about, for an open directory and for each name that it holds
LOG_AGAIN_S = 60  # between two log lines about one group: a fault repeated each second fills no disk
ERRORS = 64  # lines kept for `.errors` of one group, of each user
ERROR_USERS = 64  # whose lines are kept: 2 MB where each was refused often; the one refused longest ago is forgotten
ERROR_BYTES = 256  # of the text of a refusal: it may hold words of the refused command
CTL_BYTES = 65_536  # one write to `ctl` or `.cursor`, and the incomplete line kept in a handle
DROPPED = 65_536  # messages of a group dropped one by one and not yet below its low watermark
ANCHORS = 256  # remembered steps of the wall clock in one group
SHARED_SETTINGS = 256  # texts of ctl whose settings groups share
SHARED_JSON, SHARED_JSON_BYTES = 256, 2_048  # encoded messages that readers share, and the largest such: 4 MB
CURSOR_NAMES = 1_024  # names of one `select`
NAMES_SENT = 16_384  # of streams, remembered for a reader; then they are sent again
PREFETCH = 16_384  # messages that one read of a consumer claims at most, and one write to it settles
STRETCHES = 1_024  # splits in a reply to `measure`: some 30 KiB
STRETCH_SEGMENTS = 16  # that it scans: a few ms each where not all streams are wanted
CURSOR_SLACK_MESSAGES = 1_024  # that a `.cursor` may keep from being trimmed in a `replay off` group
PATTERN_BYTES = 512  # of a topic pattern: the longest name with a wildcard between any two words
PATTERN_WORDS = 64  # of a topic pattern: bounds what a name costs against a hostile one (words × words)
PROGRAM_BYTES = 4_096  # of a routing program: fits a line of `ctl` quoted, and is read within some ms
PROGRAM_SEARCHES = 512  # calls of payload_contains, and of functions of packages, in all programs of a group
PROGRAM_SEARCH_BYTES = 16 << 20  # that they search of one message together: all of any message of 32 KiB; some ms
PROGRAM_DEPTH = 32  # parentheses inside one another: far from any recursion limit, more than anyone can read
KEY_WAITING = 65_536  # messages of one consumer that wait for their key: some 20 MB; with more its search stops
BREAKER = 1_024  # dead letters that a breaker counts: the times of as many are kept
CONSUMERS = 65_536  # in one group: about 2 KiB each, and the state record names them all
PATTERNS = 65_536  # patterns and programs of one group's views
VIEW_PATTERNS = 1_024  # of one view
HELD = 262_144  # delayed messages of a group: about 300 B of memory each; shared
REQUEST_S = 86_400.0  # that a request may wait for its reply
SCHEDULES = 1_024  # of a group; shared
DEDUP_IDS = 262_144  # remembered in one group: about 250 B each, and the state record holds them; shared
ID_BYTES = 255  # id of a `.put`
KEY_BYTES = 255  # key of a message: as much as a name
KEYS = 65_536  # of a group with `replay key`: some 450 B of memory each, and 7 at the head of each segment
PUT_BYTES = 65_536  # the JSON object before the body of a `.put`
UNIT_BYTES = 512 << 20  # of one atomic batch: recovery reads a torn one whole, and others wait for it
BATCH_PIECE_BYTES = 64 << 10  # of frames looked at in one step: some 5,000 of the smallest, about a millisecond
UNIT_PIECE_BYTES = 1 << 20  # of a large atomic batch that is encoded and written at once
UNIT_MESSAGES = 1_048_576  # of one atomic batch: others wait for them, and the index of its segment is in memory
PARTS = 4_096  # staged batches at once in the whole tree; shared: some 70 KiB of memory each if small
PART_BUFFER_BYTES = 64 << 10  # of a staged batch in memory: the rest is on disk, and small ones have none
STAGED_BYTES = 8 << 30  # of all staged batches together, on disk; in a memory store MEMORY_BYTES; shared
STAGED_ID_BYTES = 600  # of memory (HELD_BYTES) for an id in a staged batch until its commit: it takes 300 to 550
TRANSACTION_IDLE_S = 24 * 3_600  # without a write a staged batch is dropped: jobs that take longer are rare
PRODUCERS = 16_384  # remembered in one group: about 100 B each in the state record; shared
PRODUCER_KEPT_S = 7 * 24 * 3_600  # without a commit for this long a producer may be forgotten where there are too many
DESCRIPTOR_WAIT_S = 5.0  # that a write waits for a sync which lacks a descriptor; then it is an error
COMMAND_BYTES = MESSAGE_BYTES  # one write to `.txn/ctl`: it names every part
COMMAND_WORDS = 16_384  # of it: some ms; it names at most all parts, or all producers, of which a user has half
HEADER_BYTES = 16_384  # headers of one message: those that a dead letter adds must still fit a u16
PART_DIGITS = 9  # of each number in the header `part`: an atomic batch has far fewer messages, and a u32 holds it
REASON_BYTES = 1_024  # of a message that is made a dead letter
KEPT_COPY_BYTES = 4 << 20  # an open `.kept` file up to this size is a copy, if it has few messages
KEPT_COPY_MESSAGES = 1_024  # where it has no more: to read them one by one takes some 8 ms
KEPT_MESSAGE_BYTES = 72  # of a quota `kept=`, for a message beside body and headers: 32 in the log and its index each
GROUP_BYTES = 16 << 30  # log of one group on disk; above it the group's `full` decides as at `depth`
SLICE_S = 0.01  # of work in one piece: longer work continues later, and others are served between
COALESCED_MESSAGES = 512  # that a read under `data coalesce` gathers: 1 to 2 milliseconds
PASSED_MESSAGES = 256  # that a read passes over in one piece, in search of one that is selected: 1 to 2 milliseconds
SCANNED_MESSAGES = 4  # of streams that are not selected: they count as one that is passed over
PASSED_BYTES = 4_096  # of a body that count as one more: a program may search it
LOOKING_S = 0.001  # of work that only looks, in one piece: others wait for it whoever wants it
PIECE_S = 0.00005  # of any work that is done in pieces, while other users are present: what a request of theirs takes
TRIM_BYTES = 256 << 10  # written to a log before it is trimmed
MEMORY_BYTES = 256 << 20  # log of one group in a memory store

# The store
SEGMENT_BYTES = 64 << 20  # one segment: small enough to drop and compact, large enough to be few
SEGMENT_RECORDS = 262_144  # so that the index of the open segment stays under 8 MiB of memory
SEGMENT_FIRST_BYTES = 64 << 10  # preallocated at first, then doubled
INDEX_STRIDE_BYTES = 1 << 20  # the index of the open segment is extended this often: bounds the scan of a recovery
SEQUENCE_BLOCK = 65_536  # sequences reserved on disk at once
VOLATILE_SEQUENCES = 1 << 32  # reserved at each start for a group with `keep ring`
RING_SEQUENCE_BLOCK = 1 << 22  # while a group has a ring: twice the messages published during a sync
GROUP_NUMBER_BLOCK = 256  # group numbers reserved on disk at once
STATE_RECORD_BYTES = 1 << 20  # a larger state spans records
OPEN_BUCKETS = 512  # segments kept open at once; well under the usual 1,024 files of a process
DOWNTIME_DAYS = 7  # the most the engine clock advances over a restart on another boot

# Memory of a process
# malloc returns blocks of this size to the OS at once: above a request, and below the columns of an index, which grow
# and leave holes.
LARGE_BYTES = 5 << 18
KEPT_BYTES = 32 << 20  # of freed memory kept for the next requests: some of the largest ones
GARBAGE = 1_000, 5, 1_000  # new objects between collections: of the youngest, the next, and all, each counted in those
GARBAGE_CONNECTIONS = 16  # connections between collections of what is young: about a thousand objects

# 9P
MSIZE_LEAST = 4_096
MSIZE_MOST = 1 << 20
MSIZE_DEFAULT = (128 << 10) + 24
CONNECTIONS = 4_096  # shared: those of one user, over TCP of one host
FIDS = 65_536  # of one connection
TURN_S = 0.0002  # of one user's requests in one piece, while other users have some, too
TURN_SHARED_S = 0.25  # after two users had a request each they count as present
TURN_LONG_S = 0.001  # a longer request is followed by a pause of its user, while others are present:
TURN_REST = 3  # at least this many times its own duration,
TURN_REST_REQUESTS = 400  # then until the others had this many: fewer than one in 100 meets such a request,
TURN_REST_S = 0.02  # or had none for so long,
TURN_REST_MOST, TURN_REST_MOST_S = 20, 1.0  # and at most that many times its own duration, or this long
IDLE_AT_ONCE = 16  # connections of one user that are woken in one pass: 20 to 50 us each
ACCEPTED_S = 0.0005  # between two connections that are accepted while other users ask: each costs some 0.2 ms
BATCH_S = 0.0005  # of requests in one piece where one user is alone; see BATCHES in connection.py
TAGS = 16_384  # parked requests of one connection; above it reads are refused, writes stop it
STATS_AT_ONCE = 12  # entries in one reply of 9P2000: 8 us each, and others are served between two
NAMES_AT_ONCE = 128  # the same of 9P2000.L: 1 us each
WALK_NAMES = 16  # the protocol's own limit
SILENT_S = 30  # of a TCP connection, before keepalive probes: a dead peer may hold what others wait for
ASKED = 3  # keepalive probes, within SILENT_S; the system's defaults take two hours
CLIENT_SILENT_S = 9  # the same at a client, which has another server to go to: then it asks the server itself, too
CLIENT_LINK_BYTES = 16 << 10  # a second, at least: what a client sent before that question gets so much longer
UNACKNOWLEDGED = 7  # times that a client's kernel sends the same again, in 25 s; its own limit is a quarter of an hour
REPLY_BYTES = 1 << 20  # replies of one connection not yet taken by its client; above it the connection is not read
FID_BYTES = 1_024  # of memory, about, for a fid
HANDSHAKE_S = 10.0  # of the handshake of TLS, and from there to a Tattach: silent clients hold no place for longer
TLS_BYTES = 80 << 10  # of memory, about, for the TLS of a connection: a quarter of it while there is no traffic

NAMES_S = 60.0  # that names, numbers and groups of the system's users are cached
NAMES_WAIT_S = 1.0  # that a user who was known waits for a new answer of the user database
NAMES_KEPT_S = 900.0  # that a user who was known keeps the last answer where there is no new one
NAMES_RETRY_S = 0.1  # between two attempts to ask, where as many are on their way as may be
NAMES_KEPT, NAMES_ASKED = 4_096, 32  # answers, and look-ups at once: threads
TOKEN_BYTES = 1_024  # of a secret; most are under a hundred
TOKEN_GUESSES = 3  # wrong ones before a connection ends
TOKEN_DELAY_S = 2.0  # until a wrong one is answered and its connection's place is free: some 1,000 a second of one host
TOKEN_FILE_BYTES = 1 << 20  # some thousand users; each attempt compares with all of them

# HTTP
HTTP_PARSED_BYTES = 1_024  # of heads in one piece, at least: some 40 of the smallest, about half a millisecond
HTTP_LINE_BYTES = 8_192  # of a request's first line: every path of the tree fits
HTTP_HEADERS = 64  # of one request
HTTP_HEADER_BYTES = 16_384  # of them together: as many as one message may have
HTTP_TARGETS, HTTP_TARGET_BYTES = 512, 128  # of requests, remembered, and how long those may be: 4 MB at most
HTTP_BATCH_BYTES = 16 << 20  # body of a `.batch`; of any other request a message's
HTTP_HEAD_S = 10.0  # from the first byte of a request to the end of its headers
HTTP_BODY_RATE = 1_024  # bytes a second, at least, of a body, after HTTP_HEAD_S
HTTP_IDLE_S = 60.0  # between two requests of one connection
HTTP_SEND_S = 60.0  # without a byte taken by the client, of an answer that has an end
HTTP_LINGER_S = 2.0  # a refused request is read on for so long: a reset would destroy its answer
HTTP_REPEAT_S = 1.0  # a connection that publishes to a stream again and again keeps it open so long after a message
HTTP_BEAT_S = 15.0  # of silence, then a comment: proxies close at 60 s, and only a write finds a peer that vanished
HTTP_CONNECTIONS = 4_096  # shared: those of one user, over TCP of one block of addresses
HTTP_USER_CONNECTIONS = 256  # of one user, over TCP of one host
HTTP_USER_STREAMS = 256  # answers of one user without an end, at once
HTTP_SEND_BUFFER_BYTES = 256 << 10  # of the kernel, of one connection: a slow reader has no more beyond its message
HTTP_PAGE_BYTES = 1 << 20  # of a read that is counted: what `Mqfs-Next` says is then known before its first byte
HTTP_READ_BYTES = 16 << 20  # that `bytes=` may ask for
HTTP_METRIC_LINES = 10_000  # of `.metrics` that `streams=` may ask for
HTTP_LISTED = 10_000  # names in one answer
HTTP_CLAIMED = 1_000  # messages of one claim or take, tokens of one ack
HTTP_CLAIM_BYTES = 16 << 20  # of such an answer
HTTP_USER_CLAIMS = 1_000  # open ones of one user
HTTP_LEASE_S = 30.0  # of a claim that does not say
HTTP_LEASE_MOST_S = 12 * 3_600.0
HTTP_WAIT_MOST_S = 3_600.0  # of `wait=`
HTTP_FAILURES = 10  # wrong tokens of one address; each further one is answered after HTTP_FAILURE_S
HTTP_FAILURE_S = 1.0
HTTP_ONCE_S = 50.0  # of `once`, if it does not say: proxies close at 60 s
NTFY_BYTES = 4_096  # of a message of the ntfy dialect: its clients expect that bound
NTFY_BEAT_S = 45.0  # of silence, then a keepalive: as its clients expect, and proxies close at 60 s
DURABLE_BYTES = 4 << 20  # of an append of Durable Streams; each message of it has the bound of a message
HTTP_JSON_BYTES = 256 << 10  # of an element of an array of JSON: some 7 ms to parse, whatever it holds
DURABLE_PRODUCERS = 64  # remembered of one stream; the one that appended longest ago is forgotten
DURABLE_STATE_BYTES = 8_192  # of what is remembered of them: a header of the next message
DURABLE_FORKS = 64  # of forks, each of the next: a read looks into each of their streams
DURABLE_STATES = 4_096  # of streams that are remembered: some KiB each; others are looked up in the log
DURABLE_LOOK_BACK = 64  # newest sequences in which that is looked up first, as other programs may have written since
DURABLE_RECORDS = 1_000  # of streams that are no more, in `__ds`, beside as many as there are: then it is rewritten
DURABLE_WAIT_S = 20.0  # of a long poll: as the protocol's own server has it
DURABLE_EVENTS_S = 60.0  # of an answer of events: as the protocol wants it, for caches
HTTP_ADDRESSES = 4_096  # whose wrong tokens are counted; beyond that the oldest are forgotten

# fq
FQ_HOPS = 32  # of one message: the protocol's own limit
FQ_QUEUE_CLIENTS = 16  # of a public queue: as fq has it
FQ_AUTH_S = 10.0  # from the first byte of a connection to its key or its authentication, and of a key to its pair
FQ_BATCH = 1_024  # messages of one atomic batch: some 64 KiB received at once are as many at most
FQ_SEND_BYTES = 64 << 10  # gathered for one send
FQ_SEND_MESSAGES = 128  # the same; claimed, and not with the kernel yet
FQ_WINDOW = 4_096  # messages of one client that its kernel may not have: no more are claimed for it
FQ_HELD = 1_024  # messages of one client that its kernel has, and that are not acked for FQ_HELD_S: a client that is
FQ_HELD_S = 1.0  # killed resets its connection where it left some unread, and these are then delivered again
FQ_CONFIRM_S = 0.02  # between two looks at what the peer's kernel has
FQ_PART_S = 1.0  # that the end of a client's connection for data may come after that for its commands
FQ_UNACKED_S = 60  # without an acknowledgement by the peer's kernel a connection ends, and its messages go to others
FQ_AWAY_S = 10.0  # without a byte, after which what a client that has gone sent is no longer waited for
FQ_BEATS = 3  # periods without a sign of a client that asked for heartbeats
FQ_POINTS = 16  # checkpoints of a queue: each keeps what is after it

# Bridges
BRIDGE_STOP_S = 10.0  # that the parts of a bridge of a folder have to end; then it is killed, as it may be
BRIDGE_STAMP_BYTES = 4_096  # of a bucket in UPDATE: its size is what whoever writes the folder makes it

# FUSE
UNLINK_AGAIN_S = 1.0  # in which a process does not remove a group's own file twice: see nodes.py
FUSE_REQUEST_BYTES = (1 << 20) + 4_096  # the largest request the kernel sends, with its header
FUSE_TASKS = 16_384  # opens and changes of files that wait, of about 7 KiB each; shared
LOCKS = 65_536  # flock and POSIX locks, held and waited for, of the whole tree; shared
INTERRUPTS = 1_024  # remembered that came before their request; and threads that repeat a lookup

# The server
LOG_LINES = 60  # from one statement in LOG_S: repeated faults of clients fill no disk
LOG_S = 60.0
SYSLOG_S = 0.5  # that a line waits for the daemon, which then counts as stuck: less than clients notice
LOG_LINE_BYTES = 16 << 10  # of a line of JSON: what collectors of logs pass on whole
AUDIT_REFUSALS = 20  # of one user in a second with a line each in the audit, of some 600 bytes; the others share one
SHUTDOWN_S = 5.0  # for replies and the last commit at the end

# The library
HANDLER_THREADS = 1_024  # of one handler of `on(single=True)`: as many wait as it could be called at once

# The replica
REPLICA_FRAME_BYTES = 900_000  # of one frame: a message of NATS has up to 1 MiB, with its headers
REPLICA_BATCH_BYTES = 64 << 20  # of frames that count together, in memory of a standby: the rest lies in a file
REPLICA_PART_BYTES = 8 << 20  # of a segment in one object of a checkpoint
REPLICA_CHECKPOINT_BYTES = 256 << 20  # of frames since the last checkpoint: a standby that begins reads at most those
REPLICA_CHECKPOINT_FRAMES = 10_000  # of them at most: an idle store appends one each REPLICA_BEAT_S
REPLICA_PAGE = 10_000  # names of objects that are listed at once
REPLICA_REMOVED_PARTS = 1_000  # that are removed at once, after a checkpoint is made
REPLICA_UPLOAD_S = 3_600.0  # of an upload to an engine: one that takes longer fails, and what it left is removed
REPLICA_REPORTS = 64  # standbys whose reports are kept
REPLICA_WARNING_S = 60.0  # between two lines of the log about an engine that does not answer
REPLICA_SILENT_S = 15.0  # without an answer of the engine, before /.ready and the page say so
REPLICA_BEAT_S = 1.0  # between two frames of a primary that has nothing to append: a standby misses it after some
REPLICA_LOOK_S = 2.0  # between two looks of a primary for a request to hand over: an object store charges
REPLICA_HANDOVER_S = 20.0  # that a primary may take to hand over, before it is taken over from by force
REPLICA_CALL_S = 5.0  # that an engine may take to answer; then the outcome is looked up
REPLICA_PART_S = 20.0  # the same with a part of a checkpoint, of which two are under way: by a line of 7 Mbit/s
REPLICA_PACE_S = 0.05  # between two groups of frames that no writer waits for: fewer take less processor time
REPLICA_OBJECT_S = 0.7  # the same in an object store: it charges for each, and for reports of standbys
REPLICA_STATE_S = 10.0  # between two notes of how far the disk is: a start reads the frames since
REPLICA_RESTORE_S = 60.0  # that a restore waits for an engine that does not answer, before it fails
REPLICA_RETRY_S = 2.0  # at most between two attempts at an engine that does not answer

# `mqfs bench`
BENCH_PRODUCERS = BENCH_CONSUMERS = 256  # processes of each kind: some 20 MB each
BENCH_WORKERS = 64  # see bench/payload.py: how often a message came to all of them together fits a byte
BENCH_MESSAGES = 1_000_000_000  # of one run: their numbers fit 4 bytes
BENCH_BATCH = 4_096  # as many as the library queues
BENCH_SECONDS = 86_400  # a day
BENCH_DRAIN_S = 5.0  # after Ctrl-C: for what was published to arrive
BENCH_STALL_S = 30.0  # without a message while some are missing: the run is aborted

# Rings
RING_BYTES = 16 << 20  # records of one group's ring: a reader further behind reads the log
RINGS = 64  # in one server: a GiB of memory; shared by the owners of the groups
RING_RANGE_BYTES = 1 << 20  # copied into the log at once
RING_TURN_BYTES = 1 << 20  # before the server's other tasks have their turn: some 10 ms if messages are small
RING_PATIENCE_S = 0.1  # that the server waits for a ring's lock before it retires the ring
RING_HOLD_S = 0.5  # that a client may hold a ring's lock: with its detection, others wait less than a second
RING_CHANGE_S = 60.0  # that the log retains messages for readers of a ring that has ended
RING_IDLE_S = 60.0  # a ring is kept after its last client has gone
RING_CORRUPT = 3  # times in RING_REST_S that an owner's rings may be corrupt, or block the server, before it has none
RING_REST_S = 60.0
RING_DOORS = 4_096  # connections to attach sockets: an attachment each; shared
RING_PACKET_BYTES = 8_192  # of the attach socket: a path of PATH_MAX fits
ATTACHMENTS = 63  # clients of one ring: it has 64 consumer slots, one of them the server's
