"""The engine: the tree of groups and streams. Synchronous; without I/O, clock or waiting of its own.

A call returns its result or a `Wait` (model.py). The call that makes the result possible settles the `Wait`, once, and
has then already taken the message for that reader. No call yields the thread, so each is atomic to all others.

Five layers, each above the layers that it uses:

    tree/, files/    names and open files: what open, read and write of each kind of file mean; nodes.py
    publishing/      the way in: admission, one message or a batch, transactions, delayed messages
    delivery/        the way out: parked reads, consumers, claims, redelivery, dead letters
    retention/       which messages of each stream are retained, and when the log is trimmed
    core/            the log of the group with its one writer; alarms, long work in portions, faults

`routing.py` says which messages are for a reader, `language/` parses what is written to the files. Neither changes
state.
group.py and stream.py compose the layers: a group is one log, a stream is a number in its records.

The life of a message, with the module that does each step:

    write()             files/stream.py           the bytes become one message, or several under `data line`
    admission           publishing/admission.py   rights, `depth`, `full`, an id seen before
    the record          core/log.py               appended; only then applied to the state
    held back           core/log.py               under `sync replica` only: until the replica has it
    counted             retention/retained.py     the stream keeps one more; an older one may be evicted
    handed over         delivery/fanout.py        to the reads that wait: readers, `order`, views, cursors, consumers
    synced              publishing/publisher.py   the writer waits for the commit, as `sync` says
    claimed             delivery/consumer.py      a record of the log: this receiver has it
    acknowledged        delivery/consumer.py      a record of the log: the consumer has acknowledged it
    or redelivered      delivery/redelivery.py    nack, end of the lease, receiver closed; at last a dead letter
    removed             retention/retention.py    no reader, consumer or setting needs it: its segment is removed

Rules that hold everywhere:

- A record is in the log before it is applied to the state. A failed append changes nothing.
- The same code applies a record when it is written and when the log is read at a start (state/group.py,
  state/acks.py). So a restart needs no code of its own.
- Memory grows with claimed, delayed and prioritized messages, never with the backlog, which is only in the log.
- Work that grows with the number of messages or streams is done in portions (core/portions.py, core/timers.py).
- Time, disk and processes are arguments. Tests run the engine on a clock of their own and a log in memory.
"""
