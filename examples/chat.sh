#!/bin/sh
# A chat room: a group is the room, each person writes a stream, everybody sees one order.
#
#   examples/chat.sh [ROOM [NAME]]        ROOM: ./mq/room   NAME: your login name
#
# Try it in two terminals, as two names. What was said before (the newest 1000 lines of each person) comes first.
# Ends with Ctrl-D or Ctrl-C.
set -eu

room=${1:-./mq/room}
name=${2:-$(id -un)}
[ -e "$(dirname "$room")/order" ] || { echo "$0: $room: not in a mounted tree (is the server up?)" >&2; exit 1; }

if mkdir "$room" 2>/dev/null; then
    printf 'replay all\ndepth 1000\n' >"$room/ctl"
fi
: >>"$room/$name"                       # creates the stream where it is new; an empty write is no message

mq-cat -t "$room" &                     # everybody's messages, those to come too
reader=$!
trap 'kill $reader 2>/dev/null || :' EXIT
trap 'exit 130' INT

while IFS= read -r line; do
    printf '%s\n' "$line" >>"$room/$name"
done
