#!/bin/sh
# Logging from cron: run a command, and write what it prints to a stream, a line a message.
#
#   examples/cron-log.sh GROUP JOB COMMAND [ARGUMENT]...
#
# in a crontab:  */5 * * * *  /path/to/cron-log.sh /path/to/mq/cron backup  rsync -a /home /backup
#
# The group keeps the newest 1000 lines of each job, none longer than a week, and needs no logrotate. Read it with
#   mq-cat -e -t --from -1h ./mq/cron          what all jobs said in the last hour
#   mq-cat --from end ./mq/cron backup         what one says from now on
set -eu

[ $# -ge 3 ] || { echo "usage: $0 GROUP JOB COMMAND [ARGUMENT]..." >&2; exit 2; }
group=$1 job=$2
shift 2
[ -e "$(dirname "$group")/order" ] || { echo "$0: $group: not in a mounted tree (is the server up?)" >&2; exit 1; }

if mkdir "$group" 2>/dev/null; then
    printf 'data line\nreplay all\ndepth 1000\nttl 7d\n' >"$group/ctl"
fi

# The status of the command goes last: the brace group keeps one open file, so its lines are one writer's.
{
    status=0
    "$@" 2>&1 || status=$?
    echo "exit $status"
} >>"$group/$job"
