#!/bin/sh
# A mail worker: mails are written to a group, and four mailers at a time send them, also after crashes and restarts.
#
#   examples/mail-worker.sh [GROUP [ARGUMENT OF mq-work]...]          GROUP: ./mq/outbox
#   echo 'Subject: hello' | mq put ./mq/outbox/mail                   from anywhere, one mail per write
#
# $MAILER is the command that sends one mail from its standard input, by default sendmail -t -oi. mq-work knows the exit
# codes of sendmail: after 75 it tries again later; after 65 the mail itself is bad, and becomes a message of the stream
# `dead`. Start any number of workers, on several machines: each mail is delivered to one of them. Ctrl-C or SIGTERM
# ends a worker after its present mails.
set -eu

group=${1:-./mq/outbox}
[ $# -eq 0 ] || shift
consumer=$group/.consumers/mailer
[ -e "$(dirname "$group")/order" ] || { echo "$0: $group: not in a mounted tree (is the server up?)" >&2; exit 1; }

if mkdir "$group" 2>/dev/null; then
    # A mailer that hangs is ended after four minutes. The mails of a machine that hangs are delivered to others after
    # five. A mail becomes a dead letter after 20 attempts, which take about two days. A mail that was sent is removed.
    printf '%s\n' 'lease 5m' 'retries 20' 'backoff 10s 4h' 'consumer mailer mail' >"$group/ctl"
    : >>"$group/mail"
fi

# shellcheck disable=SC2086 -- the words of MAILER
exec mq-work -j 4 --timeout 4m "$@" "$consumer" ${MAILER:-sendmail -t -oi}
