#!/bin/sh
# Dead letters and redrive: a message that fails too often is set aside, and returns when the cause has been removed.
#
#   examples/dead-letters.sh [GROUP]      GROUP: ./mq/orders
#
# The worker counts pieces. One order is invalid: it is delivered three times, with a pause before each retry, while the
# other orders are done. Then it is a message of the stream `dead`, with its history in its headers.
set -eu

group=${1:-./mq/orders}
[ -e "$(dirname "$group")/order" ] || { echo "$0: $group: not in a mounted tree (is the server up?)" >&2; exit 1; }
mkdir "$group"
printf '%s\n' 'retries 3' 'backoff 20ms 1s' 'consumer counter bought' >"$group/ctl"
printf '%s\n' '3 apples' 'six pears' '4 plums' | mq put -l --make "$group/bought"

echo 'done:'
count='read -r number what; [ "$number" -gt 0 ] 2>/dev/null || exit 1; echo "    $what: $number"'
mq-work -n 5 "$group/.consumers/counter" -- sh -c "$count" 2>/dev/null

echo 'given up:'
mq-cat -e --json --from first "$group" dead | jq -r '"    \(.body // .body_base64 | rtrimstr("\n")), after \(.headers.deliveries) deliveries"'

echo 'again, by a worker that knows words:'
mq redrive "$group" bought
count='read -r number what; [ "$number" != six ] || number=6; echo "    $what: $number"'
mq-work -n 1 "$group/.consumers/counter" -- sh -c "$count"
