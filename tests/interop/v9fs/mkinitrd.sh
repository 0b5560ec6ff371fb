#!/bin/bash
# Make the guest: busybox, the 9P and network modules of the kernel, coreutils' cat and dd, flock, and guest.sh.
# usage: mkinitrd.sh KERNEL OUT PORT
set -e
kernel=$1 out=$2 port=$3
here=$(cd "$(dirname "$0")" && pwd)
modules=$(echo "$kernel"/lib/modules/*)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{bin,dev,proc,sys,mnt,tmp,gnu,modules}
cp "$(command -v busybox)" "$root/bin/busybox"
ln -s busybox "$root/bin/sh"
for tool in cat dd flock; do
  cp "$(command -v $tool)" "$root/gnu/"
  ldd "$(command -v $tool)" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
  done
done
order="virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci failover net_failover virtio_net
  netfs fscache 9pnet 9pnet_fd 9p"
for module in $order; do
  [ ! -f "$modules/$module.ko" ] || { cp "$modules/$module.ko" "$root/modules/"; echo "$module" >>"$root/modules/order"; }
done
cp "$here/guest.sh" "$root/guest.sh"
echo "PORT=$port" >"$root/port"
cat >"$root/init" <<'INIT'
#!/bin/sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module.ko"; done </modules/order
ip link set lo up
tries=0; while [ ! -e /sys/class/net/eth0 ] && [ $tries -lt 100 ]; do usleep 50000; tries=$((tries + 1)); done
ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; ip route add default via 10.0.2.2
echo "GUEST-READY $(uname -r)"
sh /guest.sh; echo "GUEST-RC $?"
poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$out"
