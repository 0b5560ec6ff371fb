"""fq: clients of that broker, unchanged, over the tree (mqfs-fq(5)).

codec.py is the wire, without I/O; exchanges.py and queues.py map it to groups, views and consumers; delivery.py and
connection.py drive it.
"""
