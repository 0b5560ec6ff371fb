"""mq(1): put, peek, ls, stat, purge, redrive, ctl and top: thin commands over the files of a tree.

The package is not called `mq`, because `script/run` mounts the tree there.
"""
