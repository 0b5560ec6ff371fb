"""Where groups keep their logs: in memory or on disk, behind the Protocols of api.py.

A group's log is a chain of segments. Only the newest is appended to. Each begins with the whole state of the group, so
that the segments before it may be removed:

    chain.py     [state|records........] [state|records........] [state|records...      ]
                  sealed, with an .idx    sealed, compacted       open, allocated ahead
                  └ compaction.py: it holds no live message       └ appender.py: one writer

store.py has the folders of all groups, api.py what the engine asks of a log: a reader (log_reader.py), a writer
(appender.py), upkeep (upkeep.py: trimming, compaction, idle caches). disk.py makes every system call.

It is safe by these rules, in this order:

1. Records are written, then one fdatasync serves all callers that wait for it (group_commit.py).
2. Sequences are reserved in blocks: the bound is on disk before the first number below it is assigned (sequences.py).
3. A segment is removed only when the record that made its messages unwanted is on disk (compaction.py).
4. A record that fails its check is copied to quarantine/ and never deleted (store.py, check.py).
5. A failed sync makes the group read-only. No later sync counts as success.

A start reads the newest state and the records after it (recovery.py, segment/recovery.py). A torn tail, of which no
part was acknowledged, is cut; a record that fails its check within the log is damage and is reported. The bytes are
described in docs/reference/format.md.
"""
