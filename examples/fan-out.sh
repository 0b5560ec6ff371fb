#!/bin/sh
# Fan-out with wildcards: writers name events, readers name patterns of events, and neither knows the other.
#
#   examples/fan-out.sh [GROUP]           GROUP: ./mq/shop
#
# A stream's name is words with dots between. A view is a name for a pattern: * is one word, # any number. A consumer
# over a view has its own position, so each of the three receives all its messages, at its own speed. These
# include messages that were written while it was disconnected, and those of streams that are made later.
set -eu

group=${1:-./mq/shop}
[ -e "$(dirname "$group")/order" ] || { echo "$0: $group: not in a mounted tree (is the server up?)" >&2; exit 1; }
mkdir "$group"
cat >"$group/ctl" <<'END'
bind europe 'order.eu.*'
bind failures '#.failed'
consumer warehouse europe
consumer alarm failures
consumer archive
END

for name in order.eu.new order.us.new order.eu.failed payment.failed; do
    echo "$name happened" >"$group/$name"
done

for consumer in warehouse alarm archive; do
    echo "$consumer:"
    mq-work -e "$group/.consumers/$consumer" -- sed 's/^/    /'
done
