# What runs inside the guest, on Linux' own 9P client; the server is at 10.0.2.2. Ends at the first thing that is wrong.
# The host made the group `host` with `replay all`: stream `big` holds 300,000 bytes, `exact` 131,072, `small` "small\n".
. /port

: >/tmp/out; : >/tmp/one; : >/tmp/two

fail() { echo "GUEST-FAIL $name: $*"; exit 1; }

# Poll for a condition, half a minute at most.
eventually() {
  tries=0
  until eval "$1"; do
    tries=$((tries + 1))
    [ $tries -gt 600 ] && fail "never: $1"
    usleep 50000
  done
}

bytes() { wc -c <"$1"; }

# Reader $1 is killed while it waits, and goes.
killed() {
  kill "$1"
  eventually "[ ! -d /proc/$1 ]"
}

shows() {
  d=$1/$2
  mkdir $d || fail mkdir
  mkdir $d 2>/tmp/err && fail "mkdir twice"
  echo 'replay all' >$d/ctl || fail ctl
  grep -q '^replay all$' $d/ctl || fail "ctl does not show what it was told"
  echo 'replay some' >$d/ctl 2>/tmp/err && fail "bad ctl line accepted"
  echo hi >$d/s || fail echo
  [ -f $d/s ] && [ -d $d ] && [ ! -e $d/t ] || fail kinds
  [ "$(ls $d)" = "ctl
order
s" ] || fail "ls: $(ls $d)"
  ls -la $d | grep -q ' s$' || fail "ls -la"
  [ "$(dd if=$d/s bs=4096 count=1 2>/dev/null)" = hi ] || fail "one read"

  # A reader that waits is killed, and what comes afterwards is there for another.
  cat $d/s >/tmp/out & reader=$!
  eventually "[ \$(bytes /tmp/out) = 3 ]"
  killed $reader
  echo more >>$d/s
  /gnu/cat $d/s >/tmp/out & reader=$!
  eventually "[ \$(bytes /tmp/out) = 8 ]"
  killed $reader

  # Two readers and a writer.
  cat $d/s >/tmp/one & one=$!
  /gnu/cat $d/s >/tmp/two & two=$!
  eventually "[ \$(bytes /tmp/one) = 8 ] && [ \$(bytes /tmp/two) = 8 ]"
  for word in a b c d; do echo $word >>$d/s; done
  eventually "[ \$(bytes /tmp/one) = 16 ] && [ \$(bytes /tmp/two) = 16 ]"
  cmp /tmp/one /tmp/two || fail "two readers saw different things"
  killed $one
  killed $two

  # dd with a large buffer gets one message a read, not what fills the buffer; a small buffer gets it in parts.
  [ "$(/gnu/dd if=$d/s bs=1M count=1 2>/dev/null)" = hi ] || fail "dd bs=1M"
  [ "$(/gnu/dd if=$d/s bs=1M count=3 2>/dev/null | tr '\n' ' ')" = "hi more a " ] || fail "dd bs=1M count=3"
  [ "$(/gnu/dd if=$d/s bs=1 count=8 2>/dev/null | tr '\n' ' ')" = "hi more " ] || fail "dd bs=1"

  # O_NONBLOCK is known to 9P2000.L only.
  if [ $name = 9p2000.L ]; then
    : >$d/empty
    /gnu/dd if=$d/empty iflag=nonblock bs=100 count=1 2>/tmp/err && fail "read of nothing"
    grep -q 'temporarily unavailable' /tmp/err || fail "nonblock: $(cat /tmp/err)"
    rm $d/empty || fail rm
  fi

  # Locks are the server's: one held through a mount is held for another.
  if [ $name = 9p2000.L ]; then
    mkdir -p /mnt/u
    mount -t 9p -o "$options,aname=$tree" 10.0.2.2 /mnt/u || fail "second mount"
    rm -f /tmp/held /tmp/enough
    /gnu/flock $d/s sh -c ': >/tmp/held; while [ ! -e /tmp/enough ]; do usleep 50000; done' & holder=$!
    eventually "[ -e /tmp/held ]"
    /gnu/flock -n /mnt/u/$2/s true && fail "lock granted twice"
    : >/tmp/enough
    wait $holder
    /gnu/flock -n /mnt/u/$2/s true || fail "lock not given up"
    umount /mnt/u || fail "second umount"
  fi

  # Names, modes, removing.
  mv $d/s $d/t || fail rename
  [ -f $d/t ] && [ ! -e $d/s ] || fail "renamed"
  chmod 600 $d/t || fail chmod
  ls -l $d/t | grep -q '^-rw-------' || fail "mode: $(ls -l $d/t)"
  ln -s t $d/link 2>/tmp/err && fail "symbolic link"
  mkdir $d/inner && echo x >$d/inner/y || fail inner
  rmdir $d/inner 2>/tmp/err && fail "rmdir of a group with a stream"
  rm -r $d || fail "rm -r: $(ls -la $d)"
  [ ! -e $d ] || fail "still there"
}

# Large messages written by the host, read whole whatever the buffers.
large() {
  d=$1/host
  for tool in cat /gnu/cat; do
    $tool $d/big >/tmp/out & reader=$!
    eventually "[ \$(bytes /tmp/out) = 300000 ]"
    killed $reader
    tail -c 4 /tmp/out | grep -q '^end$' || fail "$tool big"
  done
  [ $(/gnu/dd if=$d/big bs=1M count=1 2>/dev/null | wc -c) = 300000 ] || fail "dd big"
  [ $(/gnu/dd if=$d/exact bs=1M count=1 2>/dev/null | wc -c) = 131072 ] || fail "dd exact"
  /gnu/cat $d/small >/tmp/out & reader=$!
  eventually "[ \$(bytes /tmp/out) = 6 ]"
  killed $reader
}

# A listing that takes several replies, each of which fills a buffer but for a rest.
lists() {
  [ "$(ls $1/many | grep -c '^00')" = 560 ] || fail "ls lists $(ls $1/many | wc -l)"
  [ "$(find $1/many -maxdepth 1 -name '00*' | wc -l)" = 560 ] || fail "find finds $(find $1/many | wc -l)"
}

# A worker in plain shell, and what a stream keeps as an ordinary file.
queues() {
  d=$1/q
  mkdir $d && echo 'replay all' >$d/ctl || fail "mkdir q"
  for n in 1 2 3 4; do echo "job $n" >>$d/s; done
  : >$d/.consumers/w && touch $d/.consumers/v || fail "touch a consumer"
  [ "$(ls $d/.consumers | tr '\n' ' ')" = "v w " ] || fail "consumers: $(ls $d/.consumers)"
  rm $d/.consumers/v || fail "rm a consumer"
  mkdir $d/.consumers/x 2>/tmp/err && fail "mkdir in .consumers"

  [ "$(stat -c %s $d/.kept/s)" = 24 ] || fail "size of kept: $(stat -c %s $d/.kept/s)"
  [ "$(tail -n 1 $d/.kept/s)" = "job 4" ] && [ $(wc -l <$d/.kept/s) = 4 ] || fail "tail, wc of kept"
  /gnu/cat $d/.kept/s >/tmp/one && cp $d/.kept/s /tmp/two && cmp /tmp/one /tmp/two || fail "cp of kept"
  [ $(bytes /tmp/one) = 24 ] && [ "$(grep -r 'job 3' $d/.kept)" = "$d/.kept/s:job 3" ] || fail "grep of kept"
  [ "$(/gnu/cat $d/.consumers/w)" = "$(cat /tmp/one)" ] || fail "what waits for a consumer"

  exec 3<>$d/.consumers/w || fail "open a consumer"
  read -r job <&3 && [ "$job" = "job 1" ] && echo ack >&3 || fail "worker: $job"
  exec 4<>$d/.consumers/w || fail "open again"
  read -r job <&4 && [ "$job" = "job 2" ] || fail "second worker: $job"
  rm $d/.consumers/w 2>/tmp/err && fail "removed while a claim is held"
  exec 4>&-
  echo 'format each' >&3
  job=$(/gnu/cat <&3) && [ "$job" = "job 2" ] || fail "given back and read by cat: $job"
  echo ack >&3 || fail ack
  job=$(/gnu/dd bs=1M count=1 2>/dev/null <&3) && [ "$job" = "job 3" ] || fail "dd: $job"
  echo 'ack' >&3 && echo 'format raw' >&3 || fail "ack after dd"
  [ "$(/gnu/dd bs=1M count=1 2>/dev/null <&3)" = "job 4" ] && echo ack >&3 || fail "the last"

  # A reader that waits is killed, and has claimed nothing.
  /gnu/cat <&3 >/tmp/out & reader=$!
  eventually "grep -q '\"parked\": 1' $d/.stats"
  killed $reader
  echo 'job 5' >>$d/s
  [ "$(/gnu/dd bs=1M count=1 2>/dev/null <&3)" = "job 5" ] || fail "after a killed reader"
  [ $(bytes /tmp/out) = 0 ] || fail "the killed reader got something"
  echo ack >&3
  exec 3>&-
  rm $d/.consumers/w && rm -r $d && [ ! -e $d ] || fail "rm -r q"
}

for name in 9p2000.L 9p2000.u 9p2000; do
  for msize in default 131096; do
    options=trans=tcp,port=$PORT,version=$name,uname=root,access=any,cache=none
    # The plain protocol is told who is mounting it; a comma cannot stand in an option.
    case $name in 9p2000) tree='/!v9fs' ;; *) tree=/ ;; esac
    [ $msize = default ] || options=$options,msize=$msize
    mkdir -p /mnt/t
    mount -t 9p -o "$options,aname=$tree" 10.0.2.2 /mnt/t || fail mount
    large /mnt/t
    lists /mnt/t
    [ $msize != default ] || { shows /mnt/t g; queues /mnt/t; }  # short messages, whatever the msize
    umount /mnt/t || fail umount
    echo "GUEST-OK $name $msize"
  done
done
