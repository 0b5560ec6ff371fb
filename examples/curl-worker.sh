#!/bin/sh
# A work queue over HTTP, with nothing but curl: jobs are published, claimed with a lease, and settled by their tokens.
#
#   mqfs serve --store store --http 127.0.0.1:8080 --tcp-user "$USER"
#   ./curl-worker.sh http://127.0.0.1:8080/jobs
#
# A job that fails comes again after the back-off; here, at its third failure, it becomes a dead letter.
set -eu
jobs=${1:?the URL of a group}

curl -fsS -X PUT "$jobs/"
curl -fsS -d 'retries 3
backoff 10ms 1s' "$jobs/ctl"
curl -fsS -X PUT "$jobs/.consumers/mailer?over=mail"

for job in alice bob nobody@; do
  curl -fsS -H "Idempotency-Key: $job" -d "$job" "$jobs/mail" >/dev/null # a repeat is harmless
done

send() { case $1 in *@) return 1 ;; *) echo "sent to $1" ;; esac; }

# One claim is one line of JSON: its first member is the token, its last the body. It ends when nothing came for 2 s.
while job=$(curl -fsS -X POST "$jobs/.consumers/mailer/claim?wait=2s&lease=1m") && [ -n "$job" ]; do
  token=$(printf %s "$job" | sed 's/^{"token":"\([^"]*\)".*/\1/')
  body=$(printf %s "$job" | sed 's/.*"body":"\(.*\)"}$/\1/')
  if send "$body"; then verb=ack; else verb=nack; fi
  curl -fsS -d "$token" "$jobs/.consumers/mailer/$verb"
done

echo "dead: $(curl -fsS "$jobs/.kept/dead")"
