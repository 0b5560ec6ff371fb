#!/bin/sh
# A mail worker: mails are written to a group, and four mailers at a time send them, whatever happens in between.
#
#   examples/mail-worker.sh [GROUP [ARGUMENT OF mq-work]...]          GROUP: ./mq/outbox
#   echo 'Subject: hello' | mq put ./mq/outbox/mail                   from anywhere, a mail a write
#
# $MAILER is what sends one mail, which it reads from its standard input: sendmail -t. The exit codes of sendmail are those
# that mq-work knows: 75, try again later; 65, the mail itself is bad: it goes to the stream `dead`. Start as many of these as
# you like, on several machines: each mail is given to one of them. Ends, after what it is doing, with Ctrl-C or SIGTERM.
set -eu

group=${1:-./mq/outbox}
[ $# -eq 0 ] || shift
consumer=$group/.consumers/mailer
[ -e "$(dirname "$group")/order" ] || { echo "$0: $group: not in a mounted tree (is the server up?)" >&2; exit 1; }

if mkdir "$group" 2>/dev/null; then
    # A mailer that hangs is ended after four minutes; a machine that hangs loses its mails to the others after five; a mail
    # is given up after 20 attempts, which take about two days. What was sent is kept no longer.
    printf '%s\n' 'lease 5m' 'retries 20' 'backoff 10s 4h' 'consumer mailer mail' >"$group/ctl"
    : >>"$group/mail"
fi

# shellcheck disable=SC2086 -- the words of MAILER
exec mq-work -j 4 --timeout 4m "$@" "$consumer" ${MAILER:-sendmail -t -oi}
