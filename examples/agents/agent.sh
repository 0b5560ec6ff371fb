#!/bin/sh
# An agent: waits for a job in its inbox, works, answers, and only then acknowledges. Needs curl and jq, and no mount.
#
#   MQFS_TOKEN=... examples/agents/agent.sh NAME COMMAND...        until it is ended; JOBS=1: after so many jobs
#   URL=http://127.0.0.1:8080/agents                               the group of the inboxes
#
# COMMAND has the job as its standard input; what it prints is sent to the inbox of the header `reply-to`, if there is one.
# Where it fails the job comes again, to this agent or another of the name; at last it is a dead letter. An agent that is
# killed loses its job to the others when its lease ends.
set -eu

name=$1
shift
url=${URL:-http://127.0.0.1:8080/agents}
inbox=$url/.consumers/$name
ask() { curl -fsS -H "Authorization: Bearer $MQFS_TOKEN" "$@"; }

left=${JOBS:-0}
while :; do
    job=$(ask -X POST "$inbox/claim?wait=20s&lease=1m") # where it fails this ends, with what curl says
    [ -n "$job" ] || continue
    token=$(printf %s "$job" | jq -r .token)
    to=$(printf %s "$job" | jq -r '.headers["reply-to"] // empty')
    if answer=$(printf %s "$job" | jq -rj .body | "$@"); then
        [ -z "$to" ] || printf '%s\n' "$answer" | ask -o /dev/null --data-binary @- -H "Mqfs-H-From: $name" "$url/$to"
        verb=ack
    else
        verb=nack
    fi
    printf %s "$token" | ask -o /dev/null --data-binary @- "$inbox/$verb"
    [ $((left -= 1)) -ne 0 ] || break
done
