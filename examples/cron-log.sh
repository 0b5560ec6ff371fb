#!/bin/sh
# Logging from cron: run a command, and write its output to a stream, each line as a message.
#
#   examples/cron-log.sh GROUP JOB COMMAND [ARGUMENT]...
#
# in a crontab:  */5 * * * *  /path/to/cron-log.sh /path/to/mq/cron backup  rsync -a /home /backup
#
# The group keeps the newest 1000 lines of each job, none longer than a week, and needs no logrotate. Read it with
#   mq-cat -e -t --from -1h ./mq/cron          the output of all jobs in the last hour
#   mq-cat --from end ./mq/cron backup         the output of one job from now on
set -eu

[ $# -ge 3 ] || { echo "usage: $0 GROUP JOB COMMAND [ARGUMENT]..." >&2; exit 2; }
group=$1 job=$2
shift 2
[ -e "$(dirname "$group")/order" ] || { echo "$0: $group: not in a mounted tree (is the server up?)" >&2; exit 1; }

if mkdir "$group" 2>/dev/null; then
    printf 'data line\nreplay all\ndepth 1000\nttl 7d\n' >"$group/ctl"
fi

# The braces keep one file open for all output, so that the line with the exit status is the last of this run.
{
    status=0
    "$@" 2>&1 || status=$?
    echo "exit $status"
} >>"$group/$job"
