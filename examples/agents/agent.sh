#!/bin/sh
# An agent: it waits for a job in its inbox, works, replies, and then acknowledges. Needs curl and jq, but no mount.
#
#   MQFS_TOKEN=... examples/agents/agent.sh NAME COMMAND...        runs until it is ended; JOBS=1: for this many jobs
#   URL=http://127.0.0.1:8080/agents                               the group of the inboxes
#   LEASE=60                                                       seconds, min. 3: redelivers the job of a killed agent
#
# COMMAND reads the job from its standard input, and may take any time. Its output is sent to the inbox in the header
# `reply-to`, if the job has one. If the reply cannot be sent, the job becomes a dead letter. If COMMAND fails, the job
# is redelivered, to this agent or another of the same name, and after the last retry becomes a dead letter.
set -eu

[ $# -ge 2 ] && [ "${MQFS_TOKEN-}" ] || { echo "usage: MQFS_TOKEN=... $0 NAME COMMAND..." >&2; exit 2; }
name=$1
shift
url=${URL:-http://127.0.0.1:8080/agents}
lease=${LEASE:-60}
case $lease in 0* | *[!0-9]*) lease= ;; esac # in arithmetic 010 is 8, and 08 is an error
[ "$lease" -ge 3 ] 2>/dev/null || { echo "agent $name: LEASE '$LEASE' (expected a number of seconds, at least 3)" >&2 && exit 2; }
inbox=$url/.consumers/$name
answer=$(mktemp)
trap 'rm -f "$answer"' EXIT
ask() { curl --fail-with-body -sS -H "Authorization: Bearer $MQFS_TOKEN" "$@"; }
settle() { printf %s "$token" | ask -o /dev/null --data-binary @- ${2:+--max-time "$2"} "$inbox/$1"; } # 2: in seconds

# Renew the lease until the job is done or this agent is killed. A renewal that fails or gets no answer is retried
# before the lease expires.
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
    # a pipe, as a variable of the shell cannot hold all bytes
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
