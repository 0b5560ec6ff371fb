#!/bin/sh
# A chat room: the room is a group, each person writes to a stream, and all see the messages in the same order.
#
#   examples/chat.sh [ROOM [NAME]]        ROOM: ./mq/room   NAME: your login name
#
# Try it in two terminals, with two names. The newest 1000 earlier lines of each person are shown first.
# Ctrl-D or Ctrl-C ends it.
set -eu

room=${1:-./mq/room}
name=${2:-$(id -un)}
[ -e "$(dirname "$room")/order" ] || { echo "$0: $room: not in a mounted tree (is the server up?)" >&2; exit 1; }

if mkdir "$room" 2>/dev/null; then
    printf 'replay all\ndepth 1000\n' >"$room/ctl"
fi
: >>"$room/$name"                       # makes the stream if it does not exist; an empty write is not a message

mq-cat -t "$room" &                     # the messages of all, also future ones
reader=$!
trap 'kill $reader 2>/dev/null || :' EXIT
trap 'exit 130' INT

while IFS= read -r line; do
    printf '%s\n' "$line" >>"$room/$name"
done
