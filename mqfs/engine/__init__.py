"""The engine: the tree of groups and streams. Synchronous; without I/O, clock or waiting of its own.

A call returns its result or a `Wait` (model.py). Whoever makes the result possible settles the `Wait`, once, and has
then already taken the message for that reader. No call gives up the thread, so each is atomic to all others.

Five boxes, each above what it uses:

    tree/, files/    names and open files: what open, read and write of each kind of file mean; nodes.py
    publishing/      the way in: admission, one message or a batch, transactions, delayed messages
    delivery/        the way out: parked reads, consumers, claims, redelivery, dead letters
    retention/       what is kept: how much of each stream, and when the log gives back the room of the rest
    core/            the log of the group with its one writer; alarms, long work in portions, faults

`routing.py` says which messages a reader is for, `language/` what is written to the files. Neither changes anything.
group.py and stream.py compose the boxes: a group is one log, a stream is a number in its records.

The life of a message, with the module that does each step:

    write()             files/stream.py           the bytes become one message, or several under `data line`
    admission           publishing/admission.py   rights, `depth`, `full`, an id seen before
    the record          core/log.py               appended; only then does the state say so
    held back           core/log.py               under `sync replica` only: until the replica has it
    counted             retention/retained.py     the stream keeps one more; an older one may go
    handed over         delivery/fanout.py        to the reads that wait: readers, `order`, views, cursors, consumers
    synced              publishing/publisher.py   the writer waits for the commit, as `sync` says
    claimed             delivery/consumer.py      a record of the log: this receiver has it
    acknowledged        delivery/consumer.py      a record of the log: the consumer is past it
    or delivered again  delivery/redelivery.py    nack, end of the lease, receiver gone; at last a dead letter
    removed             retention/retention.py    no reader, consumer or setting needs it: its segment goes

Rules that hold everywhere:

- A record is in the log before the state says so. After a failed append nothing has changed.
- The code that applies a record is the same when it is written and when the log is read again at a start
  (state/group.py, state/acks.py). So a restart is no special case.
- Memory grows with what is claimed, delayed or has priorities, never with the backlog: that is only in the log.
- What grows with the number of messages or streams is done in portions (core/portions.py, core/timers.py).
- Time, disk and processes are arguments. Tests run the engine on a clock of their own and a log in memory.
"""
