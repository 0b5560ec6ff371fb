"""Delivery: which readers get a message, and what happens to it until it is acknowledged.

A new message passes these modules, in this order:

    fanout.py            all reads that wait: the stream's, `order`'s, cursors', views' (waiting.py), then consumers'
      registry.py        the consumers of the group by name, and which of them are over which streams
        waiting.py       the reads of one consumer that wait, in the order in which they are served
          dispatcher.py  which message its next receiver gets: requeued and urgent ones first, then the log
        consumer.py      claims it: one record of the log, and one Claim

A claim ends in one of three ways: `ack` (consumer.py, counted by backlog.py), a release or failure (redelivery.py: the
message is requeued, waits for its backoff, or becomes a dead letter), or a `seek` of the consumer. If retention removes
its message, the claim stays until one of these.

    sequences of one consumer       1 2 3 4 5 6 7 8 9      log end
                                    ─┬─ ───┬─── ──┬──
                 acked: below `low` ─┘     │      └─ not looked at yet: only in the log
            unacked: 3 and 4 are claimed, 6 is requeued; each has a row in `progress.unacked`. 5 is acked

Those rows are a consumer's memory. priorities.py indexes the messages with a priority or a ttl of their own.
exclusive_messages.py handles those that only the first claiming consumer gets (`single`). flow.py applies
a consumer's rules.
"""
