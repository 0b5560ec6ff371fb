#!/bin/sh
# A work queue over HTTP, with curl and jq: jobs are published, claimed with a lease, and settled by their tokens.
#
#   mqfs serve --store store --http 127.0.0.1:8080 --tcp-user "$USER"
#   ./curl-worker.sh http://127.0.0.1:8080/jobs
#
# A failed job is redelivered after the back-off; here, at its third failure, it becomes a dead letter.
set -eu
jobs=${1:?the URL of a group}
ask() { curl --fail-with-body -sS "$@"; } # if a request is refused, the answer has the reason

ask -X PUT "$jobs/"
ask -d 'retries 3
backoff 10ms 1s' "$jobs/ctl"
ask -X PUT "$jobs/.consumers/mailer?over=mail"

for job in alice bob nobody@; do
  ask -H "Idempotency-Key: $job" -d "$job" "$jobs/mail" >/dev/null # a repeat is harmless
done

# A job is its standard input.
send() {
  to=$(cat)
  case $to in *@) return 1 ;; *) printf 'sent to %s\n' "$to" ;; esac
}

# One claim is one line of JSON. A body that is not UTF-8 is `body_base64`. The worker ends after 2 s without a job.
while job=$(ask -X POST "$jobs/.consumers/mailer/claim?wait=2s&lease=1m") && [ -n "$job" ]; do
  token=$(printf %s "$job" | jq -r .token)
  if printf %s "$job" | jq -r '.body_base64 // (.body | @base64)' | base64 -d | send; then verb=ack; else verb=nack; fi
  ask -d "$token" "$jobs/.consumers/mailer/$verb"
done

echo "dead: $(ask "$jobs/.kept/dead")"
