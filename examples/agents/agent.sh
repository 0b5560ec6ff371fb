#!/bin/sh
# An agent: waits for a job in its inbox, works, answers, and only then acknowledges. Needs curl and jq, and no mount.
#
#   MQFS_TOKEN=... examples/agents/agent.sh NAME COMMAND...        until it is ended; JOBS=1: after so many jobs
#   URL=http://127.0.0.1:8080/agents                               the group of the inboxes
#   LEASE=60                                                       seconds, until others get a killed agent's job; 3 on
#
# COMMAND has the job as its standard input, and may take as long as it likes; what it prints is sent to the inbox of
# the header `reply-to`, if there is one. Where that cannot be sent the job is a dead letter. Where COMMAND fails the
# job comes again, to this agent or another of the name; at last it is a dead letter.
set -eu

[ $# -ge 2 ] && [ "${MQFS_TOKEN-}" ] || { echo "usage: MQFS_TOKEN=... $0 NAME COMMAND..." >&2; exit 2; }
name=$1
shift
url=${URL:-http://127.0.0.1:8080/agents}
lease=${LEASE:-60}
case $lease in 0* | *[!0-9]*) lease= ;; esac # arithmetic takes 010 for 8, and fails at 08
[ "$lease" -ge 3 ] 2>/dev/null || { echo "agent $name: LEASE '$LEASE' (expected a number of seconds, at least 3)" >&2 && exit 2; }
inbox=$url/.consumers/$name
answer=$(mktemp)
trap 'rm -f "$answer"' EXIT
ask() { curl --fail-with-body -sS -H "Authorization: Bearer $MQFS_TOKEN" "$@"; }
settle() { printf %s "$token" | ask -o /dev/null --data-binary @- ${2:+--max-time "$2"} "$inbox/$1"; } # 2: in seconds

# Renew the lease until the work is done, or this agent was killed. A renewal that fails, or is not answered, is tried
# again before the lease ends.
renew() {
    while sleep $((lease / 3)) && kill -0 $$; do
        settle "touch?lease=${lease}s" $((lease / 12)).5 || :
    done >/dev/null 2>&1
}

left=${JOBS:-0}
while :; do
    job=$(ask -X POST "$inbox/claim?wait=20s&lease=${lease}s") || { echo "agent $name: ${job:-no answer}" >&2; exit 1; }
    [ -n "$job" ] || continue
    token=$(printf %s "$job" | jq -r .token)
    to=$(printf %s "$job" | jq -r '.headers["reply-to"] // empty | @uri')
    renew &
    verb=ack
    # bytes that are no text have no place in a shell's variable
    if printf %s "$job" | jq -r '.body_base64 // (.body | @base64)' | base64 -d | "$@" >"$answer"; then
        [ -z "$to" ] || ask -o /dev/null --data-binary "@$answer" -H "Mqfs-H-From: $name" "$url/$to" ||
            verb="dead?reason=no+reply+sent"
    else
        verb=nack
    fi
    kill $! 2>/dev/null || :
    settle "$verb" || echo "agent $name: the job is done again" >&2
    [ $((left -= 1)) -ne 0 ] || break
done
