#!/bin/sh
# A polite crawler: it fetches at most two pages a second, each once, and the links that it finds are its next jobs.
#
#   examples/crawler.sh [GROUP] URL       GROUP: ./mq/crawl
#
# Pages are written to the stream `pages`; `mq-cat mq/crawl pages` shows them. A link is a message of the stream `links`
# whose id is the link, so the server ignores repeats of it for a day. $FETCH is the command that prints a page, by
# default curl -fsS; $RATE is the rate of fetches, by default 2/s. Only links into URL's directory and below are
# followed. After a kill start the crawler again: it continues where it was. Ctrl-C ends it.
set -eu

if [ "${MQ_SEQUENCE-}" ]; then # mq-work runs this script for each link
    url=$1
    page=$(${FETCH:-curl -fsS} "$url") || exit 75 # try again later
    printf '%s\n%s\n' "$url" "$page" | mq put "$MQ_GROUP/pages"
    printf '%s\n' "$page" | grep -o 'href="[^"#?]*"' | cut -d'"' -f2 | while IFS= read -r link; do
        case $link in
            "$SITE"*) mq put -N --id "$link" "$MQ_GROUP/links" "$link" ;;
        esac
    done
    exit 0
fi

[ $# -ge 1 ] || { echo "usage: $0 [GROUP] URL" >&2; exit 2; }
url=${2:-$1}
group=./mq/crawl
[ $# -lt 2 ] || group=$1
[ -e "$(dirname "$group")/order" ] || { echo "$0: $group: not in a mounted tree (is the server up?)" >&2; exit 1; }
if mkdir "$group" 2>/dev/null; then
    printf '%s\n' 'replay all' 'dedup 1d' 'retries 4' 'backoff 100ms 1m' 'consumer crawler links' >"$group/ctl"
    : >>"$group/links"
    : >>"$group/pages"
fi

mq put -N --id "$url" "$group/links" "$url"
SITE=${url%/*}/ exec mq-work -j 4 --rate "${RATE:-2/s}" --timeout 1m "$group/.consumers/crawler" -- "$0" {}
