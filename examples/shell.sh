#!/bin/sh
# A persistent shell: a session of pin(1) that is typed into and looked at without being attached.
#
#   examples/shell.sh [ID]                ID: demo; the mount is $MQFS or ./mq
#
# It makes the session, types two commands, waits for their output by reading the stream `out`, and ends it.
# Attach to one of your own with:  pin work      and leave it with Ctrl-\
set -eu

id=${1:-demo}
mount=${MQFS:-./mq}
export MQFS="$mount"

pin -c "$id" sh                         # runs from now on, whatever becomes of this script
pin -w "$id" 'answer=$((6 * 7))'        # each -w is a program of its own; the shell is one and the same
pin -w "$id" 'echo "the answer: $answer"; exit 3'

status=0
pin -a "$id" </dev/null || status=$?    # not a terminal: prints everything and ends with the session
echo "the shell ended with status $status"
rm -r "${mount:?}/$id"
