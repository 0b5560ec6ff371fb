"""fq: a front end for unchanged clients of that broker (mqfs-fq(5)).

codec.py is the wire, without I/O; exchanges.py and queues.py map it to groups, views and consumers; delivery.py and
connection.py drive it.
"""
