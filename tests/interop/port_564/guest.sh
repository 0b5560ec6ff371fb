# What runs inside the guest: /tunnel stands for ssh, /example is the manual's line, made by the test.
. /port

fail() { echo "GUEST-FAIL $*"; exit 1; }

/tunnel 10.0.2.100 "$PORT" /tmp/mq.sock &
tries=0; until [ -S /tmp/mq.sock ] || [ $tries -gt 200 ]; do usleep 50000; tries=$((tries + 1)); done
sh /example || fail mount
[ "$(cat /mnt/host/ctl | head -n 2 | tail -n 1)" = "replay all" ] || fail ctl
[ "$(dd if=/mnt/host/s bs=4096 count=1 2>/dev/null)" = "from the host" ] || fail read
echo "from the guest" >/mnt/host/s || fail write
umount /mnt || fail umount
