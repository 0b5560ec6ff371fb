#!/bin/sh
# Make an inbox and a token for each agent. The operator runs this once.
#
#   examples/agents/setup.sh FILE AGENT...         FILE: that of --token-file; prints `AGENT TOKEN` lines
#   GROUP=./mq/agents                              the group of the inboxes, in a mount
#
# An inbox is a stream with a consumer of the same name. A job that has failed three times becomes a message of the
# stream `dead`. A token gives access to this group only; `mqfs token revoke ID` shuts an agent out, and the audit has
# the actions of each agent.
set -eu

[ $# -ge 2 ] || { echo "usage: $0 FILE AGENT..." >&2; exit 2; }
file=$1
shift
group=${GROUP:-./mq/agents}
[ -e "$(dirname "$group")/order" ] || { echo "$0: $group: not in a mounted tree (is the server up?)" >&2; exit 1; }
if mkdir "$group" 2>/dev/null; then
    printf '%s\n' 'replay all' 'ttl 7d' 'retries 3' 'backoff 1s 1m' >"$group/ctl"
fi
for agent; do
    : >>"$group/$agent"
    [ -e "$group/.consumers/$agent" ] || echo "consumer $agent $agent" >"$group/ctl"
    token=$(mqfs token new "$(id -un)" --token-file "$file" --scope write --path "/${group##*/}" --note "$agent")
    echo "$agent $token"
done
