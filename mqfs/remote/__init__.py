"""The tree of a remote server, for a mount: the same calls as the engine's tree, made over 9P.

link.py drives one connection in trio's loop. session.py replaces lost connections and repeats unanswered calls. tree.py
has the calls on names and the locks, files.py the open files. The protocol is mqfs.ninep's, with the reads that
ninep/server/resumable.py describes.
"""
