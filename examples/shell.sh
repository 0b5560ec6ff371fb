#!/bin/sh
# A persistent shell: a session of pin(1) that is typed into and read without a terminal attached to it.
#
#   examples/shell.sh [ID]                ID: demo; the mount is $MQFS or ./mq
#
# It makes the session, types two commands, waits for their output by reading the stream `out`, and ends it.
# Attach to one of your own with:  pin work      and leave it with Ctrl-\
set -eu

id=${1:-demo}
mount=${MQFS:-./mq}
export MQFS="$mount"

pin -c "$id" sh                         # continues to run, also after the end of this script
pin -w "$id" 'answer=$((6 * 7))'        # each -w is a program of its own, but all write to the same shell
pin -w "$id" 'echo "the answer: $answer"; exit 3'

status=0
pin -a "$id" </dev/null || status=$?    # without a terminal: prints all output, and ends with the session
echo "the shell ended with status $status"
rm -r "${mount:?}/$id"
