"""A store whose log is also kept by an existing distributed engine: the replicated log, its writer and its readers.

    primary   group commits -> frames (frame.py) -> log.py: one append in flight, fenced
    standby   frames -> the same bytes in the same segment files

It is safe by these rules:

1. The log is the election. A primary begins with a record `own`; an append counts only while its sender is the newest
   owner.
2. A primary has one append in flight. An append without an answer is unknown: it is looked up, never assumed.
3. Every frame has the number and the check sum of the frame before it, so a log that lost records or was replaced is
   detected.
4. A checkpoint names only bytes from confirmed frames. Frames are removed only when a checkpoint replaces them.
5. No clock decides which server is the primary. Clocks only say when a standby tries, and what `--until @TIME` means.
   How long nothing ran before a takeover the standby has measured (`takeover.Hearing`): its own wall clock expires
   nothing.

Nothing of it is imported without `--replica`.
"""
